"""Hugging Face checkpoints for the tests: the golden one of transformers, and random ones written without kcp's code."""

from __future__ import annotations

import copy
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
from golden_cases import golden_file

GOLDEN = "hf_kimi_linear_tiny"

# Two layers: KDA with a dense feed-forward, MLA with a mixture of experts.
TINY = {
    "model_type": "kimi_linear", "vocab_size": 23, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"], "mlp_layer_types": ["dense", "sparse"],
    "linear_num_heads": 2, "linear_head_dim": 8, "linear_conv_kernel_dim": 4,
    "num_attention_heads": 2, "num_key_value_heads": 2, "kv_lora_rank": 6, "q_lora_rank": None, "qk_nope_head_dim": 5,
    "qk_rope_head_dim": 3, "v_head_dim": 4, "num_experts": 4, "num_experts_per_token": 2, "num_shared_experts": 1,
    "moe_intermediate_size": 10, "num_expert_group": 1, "topk_group": 1, "moe_renormalize": True, "routed_scaling_factor": 2.446,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip

# What the released 48B model says of itself, as far as kcp reads it.
RELEASED = {
    "model_type": "kimi_linear", "vocab_size": 163840, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 27,
    "linear_attn_config": {
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
        "kda_layers": [1, 2, 3, 5, 6, 7, 9, 10, 11, 13, 14, 15, 17, 18, 19, 21, 22, 23, 25, 26],
        "num_heads": 32, "head_dim": 128, "short_conv_kernel_size": 4,
    },
    "num_attention_heads": 32, "num_key_value_heads": 32, "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "mla_use_nope": True, "first_k_dense_replace": 1, "moe_layer_freq": 1,
    "num_experts": 256, "num_experts_per_token": 8, "num_shared_experts": 1, "moe_intermediate_size": 1024, "num_expert_group": 1,
    "topk_group": 1, "use_grouped_topk": True, "moe_renormalize": True, "moe_router_activation_func": "sigmoid",
    "routed_scaling_factor": 2.446, "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "hidden_act": "silu", "head_dim": 72,
}  # fmt: skip

KDA_SHAPES = {
    "q_proj.weight": (16, 16), "k_proj.weight": (16, 16), "v_proj.weight": (16, 16), "q_conv1d.weight": (16, 1, 4),
    "k_conv1d.weight": (16, 1, 4), "v_conv1d.weight": (16, 1, 4), "A_log": (1, 1, 2, 1), "dt_bias": (16,), "b_proj.weight": (2, 16),
    "f_a_proj.weight": (8, 16), "f_b_proj.weight": (16, 8), "g_a_proj.weight": (8, 16), "g_b_proj.weight": (16, 8),
    "o_norm.weight": (8,), "o_proj.weight": (16, 16),
}  # fmt: skip
MLA_SHAPES = {
    "q_proj.weight": (16, 16), "kv_a_proj_with_mqa.weight": (9, 16), "kv_a_layernorm.weight": (6,), "kv_b_proj.weight": (18, 6),
    "o_proj.weight": (16, 8),
}  # fmt: skip
DENSE_SHAPES = {"gate_proj.weight": (24, 16), "up_proj.weight": (24, 16), "down_proj.weight": (16, 24)}
MOE_SHAPES = {"gate.weight": (4, 16), "gate.e_score_correction_bias": (4,)}
MOE_SHAPES |= {f"experts.{e}.{w}.weight": (16, 10) if w == "w2" else (10, 16) for e in range(4) for w in ("w1", "w2", "w3")}
MOE_SHAPES |= {"shared_experts.gate_proj.weight": (10, 16), "shared_experts.up_proj.weight": (10, 16)}
MOE_SHAPES |= {"shared_experts.down_proj.weight": (16, 10)}


def golden_folder() -> Path:
    """The checkpoint that transformers wrote; skips the test where there is none."""
    return golden_file(f"{GOLDEN}/config.json").parent


def golden_results() -> dict[str, np.ndarray]:
    """Token ids, logits, loss and gradients of transformers."""
    store = np.load(golden_file(f"{GOLDEN}/golden.npz"))
    return {name: store[name] for name in store.files}


def shifted_labels(ids: np.ndarray) -> np.ndarray:
    """Labels of a language model: the next token, none for the last one."""
    return np.concatenate([ids[:, 1:], np.full((len(ids), 1), -100)], 1).astype(np.int32)


def as_in_memory(gradients: dict[str, np.ndarray], names: list[str], experts: int) -> dict[str, np.ndarray]:
    """Gradients by kcp's (on-disk) names as transformers holds its parameters in memory: convolutions and experts fused."""
    out = {}
    for name in names:
        base = name.split(".mlp.")[0] + ".block_sparse_moe.experts."
        if "conv1d" in name:
            parts = [gradients[name.replace("conv1d", f"{letter}_conv1d")] for letter in "qkv"]
            out[name] = np.concatenate(parts, 0)
        elif name.endswith("mlp.experts.gate_up_proj"):
            pairs = [(gradients[f"{base}{e}.w1.weight"], gradients[f"{base}{e}.w3.weight"]) for e in range(experts)]
            out[name] = np.stack([np.concatenate(pair, 0) for pair in pairs])
        elif name.endswith("mlp.experts.down_proj"):
            out[name] = np.stack([gradients[f"{base}{e}.w2.weight"] for e in range(experts)])
        else:
            out[name] = gradients[name.replace(".mlp.", ".block_sparse_moe.").replace("forget_gate.", "")]
    return out


def relative(got: np.ndarray, want: np.ndarray) -> float:
    """Relative L2 distance."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def check_golden(logits: np.ndarray, loss: float, gradients: dict[str, np.ndarray]) -> None:
    """Hold a model's results against transformers': logits 1e-5, loss 1e-6, every gradient 1e-4."""
    want = golden_results()
    assert relative(logits, want["logits"]) <= 1e-5
    assert abs(loss / float(want["loss"]) - 1) <= 1e-6
    names = [name.removeprefix("grad/") for name in want if name.startswith("grad/")]
    experts = json.loads((golden_folder() / "config.json").read_text())["num_experts"]
    got = as_in_memory(gradients, names, experts)
    assert len(names) > 60
    errors = {name: relative(got[name], want[f"grad/{name}"]) for name in names}
    assert max(errors.values()) <= 1e-4, max(errors.items(), key=lambda item: item[1])


def shapes_of_tiny() -> dict[str, tuple[int, ...]]:
    """Names and shapes of :data:`TINY`'s tensors, written down by hand."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (23, 16), "model.norm.weight": (16,), "lm_head.weight": (23, 16)}
    for layer, parts in enumerate(((KDA_SHAPES, DENSE_SHAPES), (MLA_SHAPES, MOE_SHAPES))):
        at = f"model.layers.{layer}."
        shapes |= {at + "input_layernorm.weight": (16,), at + "post_attention_layernorm.weight": (16,)}
        for prefix, part in zip(("self_attn.", "block_sparse_moe."), parts, strict=True):
            shapes |= {at + prefix + name: shape for name, shape in part.items()}
    return shapes


def random_tensors(seed: int = 0, bf16: bool = False, vocab_size: int = 23) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Tensors of :data:`TINY` as ``(dtype, shape, bytes)``; with bf16 all but A_log and dt_bias are bfloat16, as released."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, shape in shapes_of_tiny().items():
        shape = (vocab_size, *shape[1:]) if shape[0] == 23 else shape
        values = (0.3 * rng.standard_normal(shape)).astype(np.float32)
        narrow = bf16 and not name.endswith(("A_log", "dt_bias"))
        raw = (values.view(np.uint32) >> 16).astype(np.uint16).tobytes() if narrow else values.tobytes()
        tensors[name] = ("BF16" if narrow else "F32", shape, raw)
    return tensors


def write_safetensors(path: Path, tensors: dict[str, tuple[str, tuple[int, ...], bytes]]) -> None:
    """A safetensors file, byte by byte."""
    header: dict[str, Any] = {}
    begin = 0
    for name, (dtype, shape, raw) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, begin + len(raw)]}
        begin += len(raw)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(raw for _, _, raw in tensors.values()))


def write_checkpoint(folder: Path, tensors: dict, shards: int = 1, **changes: Any) -> Path:
    """A Hugging Face folder of :data:`TINY` with some keys of ``config.json`` changed."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(copy.deepcopy(TINY) | changes))
    if shards == 1:
        write_safetensors(folder / "model.safetensors", tensors)
        return folder
    weight_map = {}
    for shard in range(shards):
        part = dict(list(tensors.items())[shard::shards])
        name = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        write_safetensors(folder / name, part)
        weight_map |= dict.fromkeys(part, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def read_safetensors(folder: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """All tensors of a folder's safetensors files, byte by byte."""
    tensors = {}
    for path in folder.glob("*.safetensors"):
        content = path.read_bytes()
        size = struct.unpack("<Q", content[:8])[0]
        header = json.loads(content[8 : 8 + size])
        for name, entry in header.items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                tensors[name] = (entry["dtype"], tuple(entry["shape"]), content[8 + size + begin : 8 + size + end])
    return tensors
