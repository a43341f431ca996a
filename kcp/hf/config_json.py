"""``config.json`` of a ``kimi_linear`` checkpoint, in both spellings, to and from the keys of kcp's ``model.model_config``.

    transformers 5            the released checkpoints (``spelling="linear_attn_config"``)
    layer_types               linear_attn_config.kda_layers, .full_attn_layers   numbers of layers, the first layer is 1
    linear_num_heads          linear_attn_config.num_heads
    linear_head_dim           linear_attn_config.head_dim
    linear_conv_kernel_dim    linear_attn_config.short_conv_kernel_size
    mlp_layer_types           first_k_dense_replace, moe_layer_freq              numbers of layers, the first layer is 0

kcp's keys are those of transformers 5. A value that would make another model than kcp's is refused; nothing is guessed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kcp.config_fields import Problems, Section
from kcp.hf.errors import CheckpointError
from kcp.hf.links import leads_outside, outside

SPELLINGS = ("transformers5", "linear_attn_config")
MAX_JSON_BYTES = 64 << 20
MAX_SIZE = 1 << 24
MAX_LAYERS = 10_000
KDA, MLA, DENSE, SPARSE = "linear_attention", "full_attention", "dense", "sparse"

_LINEAR = {"linear_num_heads": "num_heads", "linear_head_dim": "head_dim", "linear_conv_kernel_dim": "short_conv_kernel_size"}
_BASE_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
_MLA_SIZES = ("num_attention_heads", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_MOE_SIZES = ("num_experts", "num_experts_per_token", "moe_intermediate_size")
_KEPT = ("bos_token_id", "eos_token_id", "pad_token_id", "model_max_length", "head_dim")
_FIXED = {
    "model_type": "kimi_linear",
    "hidden_act": "silu",
    "q_lora_rank": None,
    "mla_use_nope": True,
    "mla_use_output_gate": False,
    "moe_router_activation_func": "sigmoid",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "num_nextn_predict_layers": 0,
    "quantization_config": None,
}
_WITHOUT_EFFECT = (
    "architectures auto_map dtype torch_dtype transformers_version use_cache pretraining_tp output_router_logits rope_theta rope_scaling "
    "rope_parameters max_position_embeddings qk_head_dim _name_or_path output_attentions output_hidden_states return_dict use_grouped_topk"
).split()
_ONLY_KCP = {
    "kda_safe_gate": (False, "the softplus gate"),
    "kda_allow_neg_eigval": (False, "write strengths up to 1"),
}


def read_json(path: Path) -> dict[str, Any]:
    """Parse a JSON object.

    Raises:
        CheckpointError: one line when the file is missing, a link out of its folder, too large, not JSON or not an object.
    """
    try:
        if leads_outside(path):
            raise CheckpointError([outside(path)])
        if path.stat().st_size > MAX_JSON_BYTES:
            raise CheckpointError([f"{path}: more than {MAX_JSON_BYTES} bytes"])
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError([f"{path}: no such file"]) from None
    except OSError as error:
        raise CheckpointError([f"{path}: can't be read: {error.strerror}"]) from None
    except (ValueError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError([f"{path}: not JSON: {' '.join(str(error).split())[:120]}"]) from None
    if not isinstance(content, dict):
        raise CheckpointError([f"{path}: a JSON object is needed"])
    return content


def model_options_from_json(content: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Model options of a parsed ``config.json``.

    Args:
        content: the JSON object, in either spelling.

    Returns:
        ``(options, unused)``: keyword arguments of ``KimiLinearConfig``, the same as keys of ``model.model_config``, and
        the keys of ``content`` that kcp does not know.

    Raises:
        CheckpointError: one line for every key that is missing, ill-typed or asks for another model.
    """
    problems = Problems()
    section = Section(content, "config.json", problems)
    for key, only in _FIXED.items():
        value = section.anything(key, only)
        if value != only:
            problems.add(section.name(key), value, f"only {only!r} is supported")
    options: dict[str, Any] = {key: _needed(section, key, MAX_LAYERS if key == "num_hidden_layers" else MAX_SIZE) for key in _BASE_SIZES}
    layers = options["num_hidden_layers"]
    options |= _linear_options(section, layers)
    options["mlp_layer_types"] = _mlp_layer_types(section, layers)
    options["rms_norm_eps"] = section.number("rms_norm_eps", 1e-5, above=0.0)
    options["initializer_range"] = section.number("initializer_range", 0.02, above=0.0)
    options["tie_word_embeddings"] = section.boolean("tie_word_embeddings", False)
    if MLA in options["layer_types"]:
        options |= {key: _needed(section, key) for key in _MLA_SIZES}
        heads = options["num_attention_heads"]
        if section.anything("num_key_value_heads", heads) != heads:
            problems.add(section.name("num_key_value_heads"), content["num_key_value_heads"], f"num_attention_heads = {heads} is needed")
    if SPARSE in options["mlp_layer_types"]:
        options |= _moe_options(section)
    options |= {key: section.anything(key) for key in _KEPT if section.has(key)}
    if problems.lines:
        raise CheckpointError(problems.lines)
    known = {*_WITHOUT_EFFECT, *_MLA_SIZES, *_MOE_SIZES, *_KEPT, "num_key_value_heads", "num_shared_experts", "num_expert_group"}
    known |= {"topk_group", "moe_renormalize", "routed_scaling_factor"}
    return options, tuple(key for key in section.unread() if key not in known and content[key] is not None)


def _needed(section: Section, key: str, maximum: int | None = None) -> int:
    if not section.has(key):
        section.problems.add_line(f"{section.name(key)}: missing")
    return section.integer(key, 1, maximum=maximum)


def _linear_options(section: Section, layers: int) -> dict[str, Any]:
    """``layer_types`` and the sizes of KDA, from whichever spelling is there."""
    nested = section.section("linear_attn_config")
    if not nested.present:
        options: dict[str, Any] = {key: _needed(section, key) for key in _LINEAR}
        if not section.has("layer_types"):
            section.problems.add_line(f"{section.name('layer_types')}: missing, and linear_attn_config too")
        options["layer_types"] = _kinds(section, "layer_types", (KDA, MLA), layers)
        return options
    options = {key: _needed(nested, there) for key, there in _LINEAR.items()}
    options["layer_types"] = _partition(nested, layers)
    for key in nested.unread():
        if nested.raw[key]:
            nested.problems.add(nested.name(key), nested.raw[key], "not supported; known keys: " + ", ".join(sorted(nested.raw)))
    for key, value in options.items():
        if section.has(key) and section.anything(key) != value:
            section.problems.add(section.name(key), section.anything(key), f"linear_attn_config says {value}")
        section.anything(key)
    return options


def _kinds(section: Section, key: str, kinds: tuple[str, str], layers: int) -> list[str]:
    values = list(section.texts(key, (kinds[0],) * layers))
    if len(values) != layers:
        section.problems.add(section.name(key), f"{len(values)} entries", f"{layers} entries are needed (num_hidden_layers)")
    for kind in sorted(set(values) - set(kinds)):
        section.problems.add(section.name(key), kind, f"one of {', '.join(kinds)} is needed")
    return values


def _partition(nested: Section, layers: int) -> list[str]:
    """``layer_types`` from the two lists of layer numbers, which must name each of 1 .. layers once."""
    kinds: dict[int, str] = {}
    for key, kind in (("kda_layers", KDA), ("full_attn_layers", MLA)):
        numbers = nested.anything(key, [])
        if not isinstance(numbers, list) or not all(type(n) is int and 1 <= n <= layers for n in numbers):
            nested.problems.add(nested.name(key), numbers, f"a list of layer numbers from 1 to {layers} is needed")
            continue
        for number in numbers:
            if number in kinds:
                nested.problems.add(nested.name(key), number, "each layer is named once")
            kinds[number] = kind
    left = [number for number in range(1, layers + 1) if number not in kinds]
    if left and not nested.problems.lines:
        nested.problems.add_line(f"{nested.path}: layers {left} are in neither kda_layers nor full_attn_layers")
    return [kinds.get(number, KDA) for number in range(1, layers + 1)]


def _mlp_layer_types(section: Section, layers: int) -> list[str]:
    """Dense or sparse by layer; ``first_k_dense_replace`` and ``moe_layer_freq`` count layers from 0."""
    first = section.integer("first_k_dense_replace", 0, minimum=0)
    every = section.integer("moe_layer_freq", 1)
    experts = section.integer("num_experts", 0, minimum=0)
    by_number = [SPARSE if experts and layer >= first and layer % every == 0 else DENSE for layer in range(layers)]
    if not section.has("mlp_layer_types"):
        return by_number
    kinds = _kinds(section, "mlp_layer_types", (DENSE, SPARSE), layers)
    if (section.has("first_k_dense_replace") or section.has("moe_layer_freq")) and kinds != by_number:
        section.problems.add(section.name("mlp_layer_types"), kinds, f"first_k_dense_replace and moe_layer_freq say {by_number}")
    return kinds


def _moe_options(section: Section) -> dict[str, Any]:
    options: dict[str, Any] = {key: _needed(section, key) for key in _MOE_SIZES}
    options["num_shared_experts"] = section.integer("num_shared_experts", 0, minimum=0)
    options["num_expert_group"] = section.integer("num_expert_group", 1)
    options["topk_group"] = section.integer("topk_group", 1)
    options["moe_renormalize"] = section.boolean("moe_renormalize", True)
    options["routed_scaling_factor"] = section.number("routed_scaling_factor", 1.0, above=0.0)
    if options["num_expert_group"] > 1 and not section.boolean("use_grouped_topk", True):
        section.problems.add(section.name("use_grouped_topk"), False, "True is needed with num_expert_group > 1")
    return options


def model_options_to_json(options: Mapping[str, Any], dtype: str, spelling: str = "transformers5") -> dict[str, Any]:
    """``config.json`` of a model.

    Args:
        options: keys of ``model.model_config``; kcp's own (``kda_*``, ``seq_length``, ...) are left out.
        dtype: ``"float32"``, ``"bfloat16"`` or ``"float16"``, what the tensors are stored in.
        spelling: one of :data:`SPELLINGS`.

    Returns:
        The JSON object, keys sorted.

    Raises:
        CheckpointError: the model has an option that ``kimi_linear`` has not, or its layers can't be spelt so.
    """
    if spelling not in SPELLINGS:
        raise CheckpointError([f"spelling = {spelling!r}: one of {', '.join(SPELLINGS)} is needed"])
    problems = [
        f"{key} = {options[key]!r}: Hugging Face's kimi_linear has only {what}"
        for key, (only, what) in _ONLY_KCP.items()
        if options.get(key, only) != only
    ]
    for key, other in (("linear_num_value_heads", "linear_num_heads"), ("linear_value_head_dim", "linear_head_dim")):
        if options.get(key) not in (None, options[other]):
            problems.append(f"{key} = {options[key]!r}: Hugging Face's kimi_linear has only {other} = {options[other]}")
    if problems:
        raise CheckpointError(problems)
    sparse = SPARSE in options["mlp_layer_types"]
    shared = _BASE_SIZES + ("rms_norm_eps", "initializer_range", "tie_word_embeddings") + _MLA_SIZES
    if sparse:
        shared += _MOE_SIZES + ("num_shared_experts", "num_expert_group", "topk_group", "moe_renormalize", "routed_scaling_factor")
    content = {key: options[key] for key in shared if options.get(key) is not None}
    content |= {key: options[key] for key in _KEPT if options.get(key) is not None}
    content |= {"architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear", "hidden_act": "silu", "q_lora_rank": None}
    content |= {"dtype": dtype, "use_cache": True}
    if "num_attention_heads" in content:
        content["num_key_value_heads"] = content["num_attention_heads"]
    if not sparse:
        content["num_experts"] = None
    content |= _spelt_layers(options, spelling)
    return dict(sorted(content.items()))


def _spelt_layers(options: Mapping[str, Any], spelling: str) -> dict[str, Any]:
    kinds, feed_forwards = list(options["layer_types"]), list(options["mlp_layer_types"])
    if spelling == "transformers5":
        return {"layer_types": kinds, "mlp_layer_types": feed_forwards} | {key: options[key] for key in _LINEAR}
    first = feed_forwards.index(SPARSE) if SPARSE in feed_forwards else len(feed_forwards)
    if DENSE in feed_forwards[first:]:
        raise CheckpointError([f"mlp_layer_types = {feed_forwards}: dense layers after a sparse one need the spelling transformers5"])
    linear: dict[str, Any] = {there: options[key] for key, there in _LINEAR.items()}
    linear["kda_layers"] = [layer + 1 for layer, kind in enumerate(kinds) if kind == KDA]
    linear["full_attn_layers"] = [layer + 1 for layer, kind in enumerate(kinds) if kind == MLA]
    more = {"moe_layer_freq": 1, "moe_router_activation_func": "sigmoid", "mla_use_nope": True, "use_grouped_topk": True}
    return {"linear_attn_config": dict(sorted(linear.items())), "first_k_dense_replace": first, **more}
