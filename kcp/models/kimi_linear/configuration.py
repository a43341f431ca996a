"""Configuration of Kimi-Linear, keys in the spelling of transformers 5 plus kcp's own (``kda_*``)."""

from collections.abc import Sequence
from typing import Any

from mindformers.models.configuration_utils import PretrainedConfig
from mindformers.tools.register import MindFormerModuleType, MindFormerRegister

_DTYPES = ("float32", "float16", "bfloat16")


def _refuse(key: str, value: Any, allowed: str) -> None:
    raise ValueError(f"{key}: {value!r} is not supported; {allowed}")


@MindFormerRegister.register(MindFormerModuleType.CONFIG, legacy=False, search_names="kimi_linear")
class KimiLinearConfig(PretrainedConfig):
    """Sizes and options of a Kimi-Linear model.

    Args:
        vocab_size: Number of token ids.
        hidden_size: Width of the residual stream.
        intermediate_size: Width inside the SwiGLU feed-forward.
        num_hidden_layers: Number of decoder layers.
        layer_types: ``"linear_attention"`` (KDA) or ``"full_attention"`` (MLA) per layer; None means KDA everywhere.
        mlp_layer_types: ``"dense"`` or ``"sparse"`` (mixture of experts) per layer; None means dense everywhere.
        linear_num_heads: Query and key heads of KDA.
        linear_num_value_heads: Value heads of KDA, a multiple of ``linear_num_heads``; None means equal.
        linear_head_dim: Size of a query or key head.
        linear_value_head_dim: Size of a value head; None means ``linear_head_dim``.
        linear_conv_kernel_dim: Taps of the short convolutions.
        num_attention_heads: Heads of MLA.
        kv_lora_rank: Width of MLA's latent.
        qk_nope_head_dim: Width of the part of a query or key head that comes from the latent.
        qk_rope_head_dim: Width of the part that all key heads share; nothing is rotated.
        v_head_dim: Width of an MLA value head.
        num_experts: Routed experts of a sparse layer.
        num_experts_per_token: Experts that a token is sent to.
        num_shared_experts: Width of the shared expert, in experts.
        moe_intermediate_size: Width inside an expert.
        num_expert_group: Groups of experts.
        topk_group: Groups that a token may choose from.
        moe_renormalize: Whether the chosen scores are scaled to add up to one.
        routed_scaling_factor: Factor of the routed experts' sum.
        rms_norm_eps: Added to the mean square in every norm.
        initializer_range: Standard deviation that the weights start from.
        tie_word_embeddings: Whether the output projection is the embedding table.
        seq_length: Tokens of a training sample, over all context-parallel ranks.
        compute_dtype: Dtype of activations; parameters are float32.
        kda_cp_strategy: how KDA crosses the ranks, a strategy of :class:`~kcp.layers.kda_core.KdaCoreConfig`; ``auto`` plans for
            ``seq_length``.
        kda_ptp_head_groups: In how many groups of heads ptp_chain passes states on, a divisor of ``linear_num_heads``; 0: the largest up
            to 8.
        kda_hybrid_ulysses_degree: Consecutive ranks that exchange heads under hybrid, a divisor of the ranks and the heads; 0: the largest.
        mla_cp_strategy: ``none``, ``ulysses`` or ``latent_gather``: how MLA crosses the ranks; None means ``latent_gather`` over several.
        kda_disable_recompute: True keeps the chunk caches for the backward; False computes them again.
        recompute: Whether the backward computes each layer again instead of keeping its activations. ``kcp.train`` sets it from
            ``recompute_config.recompute``.
        kda_safe_gate: True for the lower-bound gate, False for the softplus gate.
        kda_lower_bound: Lower bound of the log decay with ``kda_safe_gate``, in [-5, 0).
        kda_allow_neg_eigval: Whether beta reaches 2.
        kda_chunk_size: Tokens of a chunk: 16, 32 or 64.
        context_parallel_size: Ranks that share a sample. ``kcp.train`` sets it from
            ``parallel_config.context_parallel``.

    Raises:
        ValueError: A layer type or an option that this release does not have.
    """

    model_type = "kimi_linear"

    def __init__(
        self,
        vocab_size: int = 163840,
        hidden_size: int = 2304,
        intermediate_size: int = 9216,
        num_hidden_layers: int = 27,
        layer_types: Sequence[str] | None = None,
        mlp_layer_types: Sequence[str] | None = None,
        linear_num_heads: int = 32,
        linear_num_value_heads: int | None = None,
        linear_head_dim: int = 128,
        linear_value_head_dim: int | None = None,
        linear_conv_kernel_dim: int = 4,
        num_attention_heads: int = 32,
        kv_lora_rank: int = 512,
        qk_nope_head_dim: int = 128,
        qk_rope_head_dim: int = 64,
        v_head_dim: int = 128,
        num_experts: int | None = None,
        num_experts_per_token: int = 8,
        num_shared_experts: int = 1,
        moe_intermediate_size: int = 1024,
        num_expert_group: int = 1,
        topk_group: int = 1,
        moe_renormalize: bool = True,
        routed_scaling_factor: float = 1.0,
        rms_norm_eps: float = 1e-5,
        initializer_range: float = 0.02,
        tie_word_embeddings: bool = False,
        seq_length: int = 4096,
        compute_dtype: str = "float32",
        kda_cp_strategy: str = "none",
        kda_ptp_head_groups: int = 0,
        kda_hybrid_ulysses_degree: int = 0,
        mla_cp_strategy: str | None = None,
        kda_disable_recompute: bool = True,
        recompute: bool = False,
        kda_safe_gate: bool = False,
        kda_lower_bound: float = -5.0,
        kda_allow_neg_eigval: bool = False,
        kda_chunk_size: int = 64,
        context_parallel_size: int = 1,
        **kwargs: Any,
    ):
        kwargs.setdefault("architectures", ["KimiLinearForCausalLM"])
        super().__init__(tie_word_embeddings=tie_word_embeddings, **kwargs)
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.layer_types = list(layer_types or ["linear_attention"] * num_hidden_layers)
        self.mlp_layer_types = list(mlp_layer_types or ["dense"] * num_hidden_layers)
        self.linear_num_heads = linear_num_heads
        self.linear_num_value_heads = linear_num_value_heads or linear_num_heads
        self.linear_head_dim = linear_head_dim
        self.linear_value_head_dim = linear_value_head_dim or linear_head_dim
        self.linear_conv_kernel_dim = linear_conv_kernel_dim
        self.num_attention_heads = num_attention_heads
        self.kv_lora_rank = kv_lora_rank
        self.qk_nope_head_dim = qk_nope_head_dim
        self.qk_rope_head_dim = qk_rope_head_dim
        self.v_head_dim = v_head_dim
        self.num_experts = num_experts
        self.num_experts_per_token = num_experts_per_token
        self.num_shared_experts = num_shared_experts
        self.moe_intermediate_size = moe_intermediate_size
        self.num_expert_group = num_expert_group
        self.topk_group = topk_group
        self.moe_renormalize = moe_renormalize
        self.routed_scaling_factor = routed_scaling_factor
        self.mla_cp_strategy = mla_cp_strategy or ("none" if context_parallel_size == 1 else "latent_gather")
        self.rms_norm_eps = rms_norm_eps
        self.initializer_range = initializer_range
        self.seq_length = seq_length
        self.compute_dtype = compute_dtype
        self.kda_cp_strategy = kda_cp_strategy
        self.kda_ptp_head_groups = kda_ptp_head_groups
        self.kda_hybrid_ulysses_degree = kda_hybrid_ulysses_degree
        self.kda_disable_recompute = kda_disable_recompute
        self.recompute = recompute
        self.kda_safe_gate = kda_safe_gate
        self.kda_lower_bound = kda_lower_bound
        self.kda_allow_neg_eigval = kda_allow_neg_eigval
        self.kda_chunk_size = kda_chunk_size
        self.context_parallel_size = context_parallel_size
        self._check(mlp_layer_types)

    def _check(self, mlp_layer_types: Sequence[str] | None) -> None:
        for key, layers, kinds in (
            ("layer_types", self.layer_types, ("linear_attention", "full_attention")),
            ("mlp_layer_types", self.mlp_layer_types, ("dense", "sparse")),
        ):
            if len(layers) != self.num_hidden_layers:
                allowed = f"num_hidden_layers = {self.num_hidden_layers} entries are needed"
                _refuse(key, layers, allowed)
            for layer, kind in enumerate(layers):
                if kind not in kinds:
                    _refuse(f"{key}[{layer}]", kind, f"{' or '.join(map(repr, kinds))} is needed")
        if self.num_experts and mlp_layer_types is None:
            _refuse("num_experts", self.num_experts, "mlp_layer_types is needed beside it, to say which layers are sparse")
        if "sparse" in self.mlp_layer_types and not self.num_experts:
            _refuse("num_experts", self.num_experts, "a number of experts is needed for sparse layers")
        if self.compute_dtype not in _DTYPES:
            _refuse("compute_dtype", self.compute_dtype, f"one of {', '.join(_DTYPES)} is needed")
        if self.context_parallel_size > 1 and self.kda_cp_strategy == "none":
            strategies = "one of ulysses, state_scan, ptp_chain, ptp_tree, hybrid"
            allowed = f"{strategies} is needed with context_parallel_size = {self.context_parallel_size}"
            _refuse("kda_cp_strategy", self.kda_cp_strategy, allowed)
        if self.seq_length % self.context_parallel_size:
            allowed = f"a multiple of context_parallel_size = {self.context_parallel_size} is needed"
            _refuse("seq_length", self.seq_length, allowed)
