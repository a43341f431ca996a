"""The configuration of a run: frozen dataclasses read from a MindFormers YAML file and checked before anything starts.

A kcp run is described by an ordinary MindFormers YAML. kcp reads from it what context parallelism depends on:

    model.model_config          the model, in the spelling of Hugging Face `kimi_linear`, and kcp's `kda_*`, `mla_*` options
    parallel_config             data_parallel * context_parallel = number of workers
    train_dataset.data_loader   the text, the sample length, the seed
    runner_config, context, ... what decides whether the run can start at all

``load_run_config`` needs neither MindSpore nor MindFormers, so NPU configurations are checked on any machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kcp import config_checks
from kcp.config_checks import LOADER, MEGATRON, OWN_LOADERS, RECALL
from kcp.config_fields import ConfigError, Problems, Section, nearest
from kcp.config_run import CheckpointOptions, EvaluationOptions, HealthOptions, MemoryOptions, callback_options, evaluation_options
from kcp.config_yaml import read_yaml

STRATEGIES = ("none", "ulysses", "state_scan", "ptp_chain", "ptp_tree", "hybrid", "auto")
MLA_STRATEGIES = ("none", "ulysses", "latent_gather")
DEVICES = ("CPU", "Ascend")
DTYPES = ("float32", "float16", "bfloat16")
CHUNK_SIZES = (16, 32, 64)
MAX_LAYERS = 10_000

_TOP_LEVEL = (
    "seed output_dir run_mode use_parallel use_legacy use_legacy_format resume_training print_separate_loss "
    "load_checkpoint load_ckpt_format load_ckpt_async auto_trans_ckpt transform_process_num src_strategy_path_or_dir "
    "only_save_strategy pretrained_model_dir do_eval eval_step_interval eval_epoch_interval ignore_data_skip "
    "data_skip_steps profile profile_communication profile_memory profile_start_step profile_stop_step "
    "profile_rank_ids profile_pipeline profile_level layer_scale lr_scale_factor trainer runner_config optimizer "
    "lr_schedule train_dataset train_dataset_task eval_dataset eval_dataset_task context parallel_config parallel "
    "recompute_config swap_config moe_config model callbacks eval_callbacks runner_wrapper metric monitor_config "
    "processor checkpoint tensorboard"
).split()
_PARALLEL_CONFIG = (
    "data_parallel model_parallel context_parallel expert_parallel pipeline_stage micro_batch_num seq_split_num "
    "use_seq_parallel optimizer_shard gradient_aggregation_group vocab_emb_dp context_parallel_algo "
    "ulysses_degree_in_cp mem_coeff"
).split()
_LAYER_SIZES = (
    "num_attention_heads kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim num_experts_per_token moe_intermediate_size "
    "num_expert_group topk_group"
).split()
_RUNNER_CONFIG = "batch_size epochs sink_mode sink_size gradient_accumulation_steps num_classes stop_step".split()


@dataclass(frozen=True)
class ModelOptions:
    """kcp's part of ``model.model_config``; field names are the keys of the file, defaults are Kimi-Linear-48B's."""

    vocab_size: int = 163840
    hidden_size: int = 2304
    intermediate_size: int = 9216
    num_hidden_layers: int = 27
    layer_types: tuple[str, ...] = ("linear_attention",) * 27
    mlp_layer_types: tuple[str, ...] = ("dense",) * 27
    linear_num_heads: int = 32
    linear_head_dim: int = 128
    linear_num_value_heads: int = 32
    linear_value_head_dim: int = 128
    linear_conv_kernel_dim: int = 4
    num_attention_heads: int = 32
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    num_experts: int = 0
    num_experts_per_token: int = 8
    num_shared_experts: int = 1
    moe_intermediate_size: int = 1024
    num_expert_group: int = 1
    topk_group: int = 1
    moe_renormalize: bool = True
    routed_scaling_factor: float = 1.0
    rms_norm_eps: float = 1e-5
    initializer_range: float = 0.02
    tie_word_embeddings: bool = False
    seq_length: int = 4096
    kda_cp_strategy: str = "none"
    kda_ptp_head_groups: int = 0
    kda_hybrid_ulysses_degree: int = 0
    mla_cp_strategy: str | None = None
    kda_chunk_size: int = 64
    kda_disable_recompute: bool = True
    kda_safe_gate: bool = False
    kda_lower_bound: float = -5.0
    kda_allow_neg_eigval: bool = False
    compute_dtype: str = "float32"
    params_dtype: str = "float32"


@dataclass(frozen=True)
class ParallelOptions:
    """``parallel_config``: how many workers, and what they share."""

    data_parallel: int = 1
    context_parallel: int = 1
    model_parallel: int = 1
    pipeline_stage: int = 1

    @property
    def world_size(self) -> int:
        """Number of workers that the run needs."""
        return self.data_parallel * self.context_parallel


@dataclass(frozen=True)
class DataOptions:
    """``train_dataset.data_loader``; see ``kcp.data.text.KcpTextDataset``."""

    loader: str = LOADER
    dataset_dir: tuple[str, ...] = ("stdlib",)
    shuffle: bool = True
    seed: int = 42
    num_samples: int = 0
    max_documents: int = 64
    tokenizer: str = ""


@dataclass(frozen=True)
class TrainingOptions:
    """What decides how the run goes: device, mode, batches, steps."""

    seed: int = 42
    output_dir: str = "./output"
    device_target: str = "Ascend"
    mode: int = 0
    batch_size: int = 1
    epochs: int = 1
    stop_step: int = 0
    gradient_accumulation_steps: int = 1
    learning_rate: float = 1e-3
    sink_mode: bool = False
    parallel_mode: int = 0
    recompute: bool = False


@dataclass(frozen=True)
class RunConfig:
    """A run that passed every check.

    Attributes:
        path: the file it was read from.
        raw: the parsed file as it stands (plain dicts; treat as read-only).
    """

    path: Path
    model: ModelOptions
    parallel: ParallelOptions
    data: DataOptions
    training: TrainingOptions
    checkpoint: CheckpointOptions = CheckpointOptions()
    health: HealthOptions = HealthOptions()
    memory: MemoryOptions = MemoryOptions()
    evaluation: EvaluationOptions = EvaluationOptions()
    raw: Mapping[str, Any] = field(repr=False, default_factory=dict)

    @property
    def world_size(self) -> int:
        """Number of workers that the run needs."""
        return self.parallel.world_size

    @property
    def local_seq_length(self) -> int:
        """Tokens of a sample that one context parallel rank holds."""
        return self.model.seq_length // self.parallel.context_parallel


def load_run_config(path: str | Path, world_size: int | None = None) -> RunConfig:
    """Read a MindFormers YAML file and check it.

    Args:
        path: the file.
        world_size: number of workers that the launch provides; None checks the file alone.

    Returns:
        The configuration, complete with defaults.

    Raises:
        ConfigError: with every problem found, one line each.
    """
    path = Path(path)
    problems = Problems()
    top = Section(read_yaml(path), "", problems)
    checkpoint, health, memory = callback_options(top)
    run = RunConfig(
        path=path,
        model=model_options(top.section("model").section("model_config")),
        parallel=_parallel(top.section("parallel_config")),
        data=_data(top),
        training=_training(top),
        checkpoint=checkpoint,
        health=health,
        memory=memory,
        evaluation=evaluation_options(top),
        raw=top.raw,
    )
    for key in top.raw:
        near = None if key in _TOP_LEVEL else nearest(key, _TOP_LEVEL, cutoff=0.8)
        if near:
            problems.add_line(f"{key}: unknown section, MindFormers would ignore it; did you mean {near}?")
    config_checks.check(run, top, problems, world_size)
    if problems.lines:
        raise ConfigError(list(dict.fromkeys(problems.lines)))
    return run


def model_options(section: Section) -> ModelOptions:
    """Read ``model.model_config``, value by value; what is wrong goes to ``section.problems``."""
    if not section.present:
        section.problems.add_line("model.model_config: missing; it holds the model's sizes and kcp's kda_* options")
        return ModelOptions()
    default = ModelOptions()
    heads = section.integer("linear_num_heads", default.linear_num_heads)
    head_dim = section.integer("linear_head_dim", default.linear_head_dim, maximum=256)
    layers = section.integer("num_hidden_layers", default.num_hidden_layers, maximum=MAX_LAYERS)
    sizes = {
        "vocab_size": section.integer("vocab_size", default.vocab_size),
        "hidden_size": section.integer("hidden_size", default.hidden_size),
        "intermediate_size": section.integer("intermediate_size", default.intermediate_size),
        "layer_types": section.texts("layer_types", ("linear_attention",) * layers),
        "mlp_layer_types": section.texts("mlp_layer_types", ("dense",) * layers),
        "linear_num_value_heads": section.integer("linear_num_value_heads", heads),
        "linear_value_head_dim": section.integer("linear_value_head_dim", head_dim, maximum=256),
        "linear_conv_kernel_dim": section.integer("linear_conv_kernel_dim", default.linear_conv_kernel_dim),
        "num_experts": section.integer("num_experts", default.num_experts, minimum=0),
        "num_shared_experts": section.integer("num_shared_experts", default.num_shared_experts, minimum=0),
        "moe_renormalize": section.boolean("moe_renormalize", default.moe_renormalize),
        "routed_scaling_factor": section.number("routed_scaling_factor", default.routed_scaling_factor, above=0.0),
        "rms_norm_eps": section.number("rms_norm_eps", default.rms_norm_eps, above=0.0),
        "initializer_range": section.number("initializer_range", default.initializer_range, above=0.0),
        "tie_word_embeddings": section.boolean("tie_word_embeddings", default.tie_word_embeddings),
        "seq_length": section.integer("seq_length", default.seq_length),
        "compute_dtype": section.choice("compute_dtype", default.compute_dtype, DTYPES),
        "params_dtype": section.choice("params_dtype", default.params_dtype, ("float32",)),
    }
    sizes |= {key: section.integer(key, getattr(default, key)) for key in _LAYER_SIZES}
    sizes["mla_cp_strategy"] = section.choice("mla_cp_strategy", "none", MLA_STRATEGIES) if section.has("mla_cp_strategy") else None
    options = ModelOptions(
        num_hidden_layers=layers,
        linear_num_heads=heads,
        linear_head_dim=head_dim,
        kda_cp_strategy=section.choice("kda_cp_strategy", default.kda_cp_strategy, STRATEGIES),
        kda_ptp_head_groups=section.integer("kda_ptp_head_groups", 0, minimum=0),
        kda_hybrid_ulysses_degree=section.integer("kda_hybrid_ulysses_degree", 0, minimum=0),
        kda_chunk_size=section.choice("kda_chunk_size", default.kda_chunk_size, CHUNK_SIZES),
        kda_disable_recompute=section.boolean("kda_disable_recompute", default.kda_disable_recompute),
        kda_safe_gate=section.boolean("kda_safe_gate", default.kda_safe_gate),
        kda_lower_bound=section.number("kda_lower_bound", default.kda_lower_bound),
        kda_allow_neg_eigval=section.boolean("kda_allow_neg_eigval", default.kda_allow_neg_eigval),
        **sizes,
    )
    config_checks.check_model_keys(section)
    config_checks.check_layers(options, section)
    section.refuse_unknown((*config_checks.HARMLESS_MODEL_KEYS, "mla_cp_strategy"))
    return options


def _parallel(section: Section) -> ParallelOptions:
    options = ParallelOptions(
        data_parallel=section.integer("data_parallel", 1),
        context_parallel=section.integer("context_parallel", 1),
        model_parallel=section.integer("model_parallel", 1),
        pipeline_stage=section.integer("pipeline_stage", 1),
    )
    section.refuse_unknown(_PARALLEL_CONFIG)
    return options


def _data(top: Section) -> DataOptions:
    loader = top.section("train_dataset").section("data_loader")
    default = DataOptions()
    if not loader.present:
        top.problems.add_line("train_dataset.data_loader: missing; it says where the text is (type: KcpTextDataset)")
        return default
    kind = loader.text("type", "")
    if kind not in OWN_LOADERS:
        near = nearest(kind, OWN_LOADERS, cutoff=0.8)
        if near or not kind:
            top.problems.add("train_dataset.data_loader.type", kind, f"did you mean {near or LOADER}?")
        return DataOptions(loader=kind)
    if kind == RECALL:
        return DataOptions(loader=kind)
    if kind != LOADER:
        return _mindformers_data(kind, loader)
    options = DataOptions(
        loader=kind,
        dataset_dir=loader.texts("dataset_dir", default.dataset_dir),
        shuffle=loader.boolean("shuffle", default.shuffle),
        seed=loader.integer("seed", default.seed, minimum=0),
        num_samples=loader.integer("num_samples", default.num_samples, minimum=0),
        max_documents=loader.integer("max_documents", default.max_documents),
        tokenizer=loader.text("tokenizer", default.tokenizer),
    )
    loader.anything("seq_length")
    loader.anything("context_parallel")
    loader.refuse_unknown(())
    return options


def _mindformers_data(kind: str, loader: Section) -> DataOptions:
    """Keys of the loaders that read MindFormers' own datasets (:mod:`kcp.data.mindformers_sets`)."""
    if kind == MEGATRON:
        if not loader.texts("data_path", ()):
            loader.problems.add(loader.name("data_path"), loader.anything("data_path"), "prefixes of .bin and .idx files are needed")
        loader.integer("num_samples", 1)
        if not loader.has("num_samples"):
            loader.problems.add(loader.name("num_samples"), None, "an integer >= 1 is needed: the samples of an epoch")
        loader.text("split", "1,0,0")
        loader.text("path_to_cache", "")
        for key in ("eod_token_id", "pad_token_id"):
            loader.integer(key, -1, minimum=-1)
    else:
        if isinstance(loader.anything("load"), Mapping):
            config_checks.check_load(loader.section("load"))
        else:
            loader.problems.add(loader.name("load"), loader.anything("load"), "a mapping, arguments of datasets.load_dataset, is needed")
        loader.anything("handler")
        loader.boolean("shuffle", True)
    options = DataOptions(
        loader=kind,
        dataset_dir=(),
        seed=loader.integer("seed", DataOptions.seed, minimum=0),
        max_documents=loader.integer("max_documents", DataOptions.max_documents),
    )
    loader.anything("seq_length")
    loader.anything("context_parallel")
    loader.refuse_unknown(())
    return options


def _training(top: Section) -> TrainingOptions:
    default = TrainingOptions()
    runner, context, schedule = top.section("runner_config"), top.section("context"), top.section("lr_schedule")
    optimizer, parallel = top.section("optimizer"), top.section("parallel")
    rates = [s.number("learning_rate", default.learning_rate, above=0.0) for s in (optimizer, schedule)]
    optimizer.number("weight_decay", 0.0, minimum=0.0)
    optimizer.number("eps", 1e-8, above=0.0)
    options = TrainingOptions(
        seed=top.integer("seed", default.seed, minimum=0),
        output_dir=top.text("output_dir", default.output_dir),
        device_target=context.choice("device_target", default.device_target, DEVICES),
        mode=context.choice("mode", default.mode, (0, 1)),
        batch_size=runner.integer("batch_size", default.batch_size),
        epochs=runner.integer("epochs", default.epochs),
        stop_step=runner.integer("stop_step", default.stop_step, minimum=0),
        gradient_accumulation_steps=runner.integer("gradient_accumulation_steps", 1),
        learning_rate=rates[1] if schedule.has("learning_rate") else rates[0],
        sink_mode=runner.boolean("sink_mode", True),
        parallel_mode=parallel.choice("parallel_mode", 1, (0, 1, 2, 3)),
        recompute=top.section("recompute_config").boolean("recompute", False),
    )
    runner.refuse_unknown(_RUNNER_CONFIG)
    return options
