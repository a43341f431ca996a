"""Rules between the values of a configuration: what kcp, its operator or the device can't do is refused here.

Each rule is one sentence of the design: degrees divide, heads allow the strategy, the device has the kernels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kcp.config_fields import Problems, Section

if TYPE_CHECKING:
    from kcp.config import ModelOptions, RunConfig

LOADER, MEGATRON, HUGGING_FACE, RECALL = "KcpTextDataset", "KcpMegatronDataset", "KcpHuggingFaceDataset", "KcpRecallDataset"
OWN_LOADERS = (LOADER, MEGATRON, HUGGING_FACE, RECALL)
_INSTEAD = {
    "BlendedMegatronDatasetDataLoader": MEGATRON,
    "HFDataLoader": HUGGING_FACE,
    "CommonDataLoader": HUGGING_FACE,
}
WRAPPER = "KcpTrainOneStepCell"
COLUMNS = ("input_ids", "labels", "loss_mask", "cu_seqlens")
BYTE_VOCABULARY = 259
HARMLESS_MODEL_KEYS = (
    "model_type architectures pad_token_id bos_token_id eos_token_id num_key_value_heads head_dim qk_head_dim q_lora_rank "
    "max_position_embeddings model_max_length use_cache pretraining_tp output_router_logits transformers_version dtype "
    "layernorm_compute_dtype softmax_compute_dtype rotary_dtype input_sliced_sig hidden_act attention_bias "
    "attention_dropout hidden_dropout moe_router_activation_func mla_use_nope offset"
).split()
_FIXED_MODEL_VALUES = {
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "q_lora_rank": None,
    "moe_router_activation_func": "sigmoid",
    "mla_use_nope": True,
}
_OTHER_SPELLING = {
    "linear_attn_config": "layer_types, linear_num_heads, linear_head_dim and linear_conv_kernel_dim",
    "first_k_dense_replace": "mlp_layer_types",
    "moe_layer_freq": "mlp_layer_types",
}


def check_model_keys(section: Section) -> None:
    """Refuse values that the model can't honour, and keys of the other spelling of a ``config.json``."""
    for key, only in _FIXED_MODEL_VALUES.items():
        value = section.anything(key, only)
        if value != only:
            section.problems.add(section.name(key), value, f"only {only} is supported")
    heads = section.anything("num_attention_heads")
    if section.has("num_key_value_heads") and heads is not None and section.raw["num_key_value_heads"] != heads:
        section.problems.add(
            section.name("num_key_value_heads"), section.raw["num_key_value_heads"], f"num_attention_heads = {heads} is needed"
        )
    for key, instead in _OTHER_SPELLING.items():
        if section.has(key):
            line = f"the spelling here is {instead}; `kcp convert hf-to-kcp` writes it"
            section.problems.add(section.name(key), section.anything(key), line)


def check_layers(model: ModelOptions, section: Section) -> None:
    """Rules between the kinds of the layers and the sizes that they need."""
    problems = section.problems
    for key, kinds in (("layer_types", ("linear_attention", "full_attention")), ("mlp_layer_types", ("dense", "sparse"))):
        given = getattr(model, key)
        if len(given) != model.num_hidden_layers:
            allowed = f"{model.num_hidden_layers} entries are needed (num_hidden_layers)"
            problems.add(section.name(key), f"{len(given)} entries", allowed)
        for kind in sorted(set(given) - set(kinds)):
            problems.add(section.name(key), kind, f"{' or '.join(kinds)} is needed for each layer")
    if model.linear_num_value_heads % model.linear_num_heads:
        allowed = f"a multiple of linear_num_heads = {model.linear_num_heads} is needed"
        problems.add(section.name("linear_num_value_heads"), model.linear_num_value_heads, allowed)
    if not -5.0 <= model.kda_lower_bound < 0.0:
        problems.add(section.name("kda_lower_bound"), model.kda_lower_bound, "a number in [-5, 0) is needed")
    if model.num_experts and not section.has("mlp_layer_types"):
        problems.add(section.name("num_experts"), model.num_experts, "mlp_layer_types is needed beside it, to say which layers are sparse")
    if "sparse" not in model.mlp_layer_types:
        return
    groups, reachable = model.num_expert_group, model.num_experts // model.num_expert_group * model.topk_group
    if not model.num_experts:
        problems.add(section.name("num_experts"), model.num_experts, "an integer >= 1 is needed with sparse layers")
    elif model.num_experts % groups:
        problems.add(section.name("num_experts"), model.num_experts, f"a multiple of num_expert_group = {groups} is needed")
    elif model.topk_group > groups:
        problems.add(section.name("topk_group"), model.topk_group, f"at most num_expert_group = {groups} is needed")
    elif model.num_experts_per_token > reachable:
        allowed = f"at most {reachable} is needed, the experts of topk_group groups"
        problems.add(section.name("num_experts_per_token"), model.num_experts_per_token, allowed)


def check(run: RunConfig, top: Section, problems: Problems, world_size: int | None) -> None:
    """Apply every rule to a configuration whose single values are typed already."""
    _check_parallel(run, problems, world_size)
    _check_strategy(run, problems)
    _check_data(run, top, problems)
    _check_device(run, top, problems)
    _check_wrapper(top.section("runner_wrapper"))


def _check_parallel(run: RunConfig, problems: Problems, world_size: int | None) -> None:
    parallel, at = run.parallel, "parallel_config."
    for key in ("model_parallel", "pipeline_stage"):
        if getattr(parallel, key) != 1:
            problems.add(at + key, getattr(parallel, key), "only 1 is supported; use data_parallel, context_parallel")
    needed = parallel.world_size
    if world_size is None or world_size == needed:
        return
    product = f"data_parallel * context_parallel = {parallel.data_parallel} * {parallel.context_parallel} = {needed}"
    if world_size == 1:
        key = "context_parallel" if parallel.context_parallel > 1 else "data_parallel"
        hint = f"{product} workers are needed but this launch provides 1; start it with: kcp train {run.path}"
    else:
        key = "context_parallel" if world_size % parallel.context_parallel else "data_parallel"
        hint = f"{product} workers are needed but this launch provides {world_size}"
    problems.add(at + key, getattr(parallel, key), hint)


def _check_strategy(run: RunConfig, problems: Problems) -> None:
    model, cp, at = run.model, run.parallel.context_parallel, "model.model_config."
    cp_key = "parallel_config.context_parallel"
    if model.kda_ptp_head_groups and model.linear_num_heads % model.kda_ptp_head_groups:
        allowed = f"a divisor of linear_num_heads = {model.linear_num_heads} is needed"
        problems.add(at + "kda_ptp_head_groups", model.kda_ptp_head_groups, allowed)
    if cp == 1:
        return
    if model.kda_cp_strategy == "none":
        allowed = f"one of ulysses, state_scan, ptp_chain, ptp_tree, hybrid is needed with {cp_key} = {cp}"
        problems.add(at + "kda_cp_strategy", model.kda_cp_strategy, allowed)
    if model.kda_cp_strategy == "ulysses":
        for key, heads in _head_counts(model):
            if heads % cp:
                problems.add(at + key, heads, f"ulysses needs a multiple of {cp_key} = {cp}; or use state_scan")
    degree = model.kda_hybrid_ulysses_degree
    if model.kda_cp_strategy == "hybrid" and degree:
        for name, value in ((cp_key, cp), *_head_counts(model)):
            if value % degree:
                problems.add(at + "kda_hybrid_ulysses_degree", degree, f"a divisor of {name} = {value} is needed")
    if "full_attention" in model.layer_types:
        if model.mla_cp_strategy == "none":
            allowed = f"ulysses or latent_gather is needed with parallel_config.context_parallel = {cp}"
            problems.add(at + "mla_cp_strategy", model.mla_cp_strategy, allowed)
        if model.mla_cp_strategy == "ulysses" and model.num_attention_heads % cp:
            allowed = f"ulysses needs a multiple of parallel_config.context_parallel = {cp}; or use mla_cp_strategy latent_gather"
            problems.add(at + "num_attention_heads", model.num_attention_heads, allowed)
    if model.seq_length % cp:
        allowed = f"a multiple of parallel_config.context_parallel = {cp} is needed"
        problems.add(at + "seq_length", model.seq_length, allowed)


def _head_counts(model) -> list[tuple[str, int]]:
    """Keys and values of the head counts, the value heads only where they differ."""
    counts = [("linear_num_heads", model.linear_num_heads)]
    if model.linear_num_value_heads != model.linear_num_heads:
        counts.append(("linear_num_value_heads", model.linear_num_value_heads))
    return counts


def _check_data(run: RunConfig, top: Section, problems: Problems) -> None:
    dataset = top.section("train_dataset")
    loader = dataset.section("data_loader")
    if run.data.loader in _INSTEAD:
        allowed = f"{_INSTEAD[run.data.loader]} is needed: it reads the same data, and ranks that share a sample get the same one"
        problems.add(loader.name("type"), run.data.loader, allowed)
    if run.data.loader not in OWN_LOADERS:
        return
    for key, expected, source in (
        ("seq_length", run.model.seq_length, "model.model_config.seq_length"),
        ("context_parallel", run.parallel.context_parallel, "parallel_config.context_parallel"),
    ):
        value = loader.anything(key, expected)
        if value != expected:
            problems.add(loader.name(key), value, f"{source} = {expected} is needed")
    if run.data.loader == LOADER and run.data.dataset_dir == ():
        problems.add(loader.name("dataset_dir"), [], "'stdlib', a file, a folder or a list of them is needed")
    if run.data.loader == LOADER and not run.data.tokenizer and run.model.vocab_size < BYTE_VOCABULARY:
        allowed = f"the byte tokenizer needs at least {BYTE_VOCABULARY} (256 bytes, pad, bos, eos)"
        problems.add("model.model_config.vocab_size", run.model.vocab_size, allowed)
    if not dataset.boolean("drop_remainder", True):
        problems.add("train_dataset.drop_remainder", False, "True is needed: every step has as many samples, so that a run can be resumed")
    columns = dataset.anything("input_columns", list(COLUMNS))
    if not isinstance(columns, list) or columns != list(COLUMNS):
        problems.add("train_dataset.input_columns", columns, f"[{', '.join(COLUMNS)}] is needed")


def check_load(load: Section) -> None:
    """Arguments of a Hugging Face dataset: nothing that would unpickle or run what comes with the data."""
    if load.anything("path") == "pandas":
        load.problems.add(load.name("path"), "pandas", "its files are pickles, which may run code; convert them to parquet or json")
    load.choice("load_func", "load_dataset", ("load_dataset", "load_from_disk"))
    if load.anything("trust_remote_code", False):
        load.problems.add(load.name("trust_remote_code"), load.anything("trust_remote_code"), "only False is supported")


def _check_device(run: RunConfig, top: Section, problems: Problems) -> None:
    training, model = run.training, run.model
    if training.parallel_mode != 0:
        given = top.section("parallel").anything("parallel_mode", "(not given, MindFormers takes 1)")
        problems.add("parallel.parallel_mode", given, "0 is needed: kcp slices samples and reduces gradients")
    parallel = run.world_size > 1
    if top.boolean("use_parallel", False) != parallel:
        allowed = f"{parallel} is needed with data_parallel * context_parallel = {run.world_size}"
        problems.add("use_parallel", top.anything("use_parallel", False), allowed)
    if top.boolean("use_legacy", True):
        problems.add("use_legacy", top.anything("use_legacy", True), "False is needed: kcp's model is not a legacy one")
    if training.device_target == "CPU":
        if training.sink_mode:
            given = top.section("runner_config").anything("sink_mode", "(not given, MindFormers takes True)")
            problems.add("runner_config.sink_mode", given, "False is needed on CPU")
        if model.compute_dtype != "float32":
            allowed = "float32 is needed on CPU: most of MindSpore's CPU kernels have no 16-bit version"
            problems.add("model.model_config.compute_dtype", model.compute_dtype, allowed)


def _check_wrapper(section: Section) -> None:
    """The one-step wrapper that reduces the gradients; MindFormers' own ones would do it twice or never."""
    if not section.present:
        return
    if section.anything("type") != WRAPPER:
        allowed = f"{WRAPPER} is needed: it reduces and checks the gradients"
        section.problems.add(section.name("type"), section.anything("type"), allowed)
        return
    section.boolean("use_clip_grad", True)
    section.number("max_grad_norm", 1.0, above=0.0)
    section.integer("max_skipped_steps", 10)
    if section.number("scale_sense", 1.0) != 1.0:
        allowed = "1.0 is needed: float32 and bfloat16 need no loss scaling"
        section.problems.add(section.name("scale_sense"), section.anything("scale_sense"), allowed)
    section.refuse_unknown(())
