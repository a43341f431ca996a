"""Kimi-Linear decoder and causal language model (Kimi Linear report, section 5): KDA and MLA layers, dense and sparse feed-forwards.

Parameter names are those of a Hugging Face ``kimi_linear`` checkpoint on disk, where the dense feed-forward too is
called ``block_sparse_moe``. The model is given whole samples and works on its rank's slice of them; only attention crosses
ranks. Documents packed into a sample never see each other: ``cu_seqlens`` reaches the state recurrence and the short convolutions.

Shape suffixes: B samples, T tokens of a sample, L tokens of this rank's slice, D hidden size, V vocabulary.
"""

import mindspore as ms
from mindformers.models.modeling_utils import PreTrainedModel
from mindformers.tools.register import MindFormerModuleType, MindFormerRegister
from mindspore import nn, ops

from kcp.layers.cross_entropy import SummedCrossEntropy, valid_tokens
from kcp.layers.kda_attention import KdaAttention, KdaAttentionConfig
from kcp.layers.linear import Embedding, Linear
from kcp.layers.mla import MlaConfig, MultiLatentAttention
from kcp.layers.mlp import SwiGLU
from kcp.layers.moe import MoeConfig, SparseMoe
from kcp.layers.norms import RMSNorm
from kcp.models.kimi_linear.configuration import KimiLinearConfig
from kcp.parallel.group import CpGroup
from kcp.parallel.subgroups import context_parallel_group


def kda_attention_config(config: KimiLinearConfig) -> KdaAttentionConfig:
    """The part of a model's configuration that a KDA layer needs."""
    return KdaAttentionConfig(
        hidden_size=config.hidden_size,
        num_heads=config.linear_num_heads,
        num_v_heads=config.linear_num_value_heads,
        head_dim=config.linear_head_dim,
        v_head_dim=config.linear_value_head_dim,
        conv_size=config.linear_conv_kernel_dim,
        safe_gate=config.kda_safe_gate,
        lower_bound=config.kda_lower_bound,
        allow_neg_eigval=config.kda_allow_neg_eigval,
        norm_eps=config.rms_norm_eps,
        strategy=config.kda_cp_strategy,
        ptp_head_groups=config.kda_ptp_head_groups or None,
        hybrid_ulysses_degree=config.kda_hybrid_ulysses_degree or None,
        disable_recompute=config.kda_disable_recompute,
        chunk_size=config.kda_chunk_size,
        initializer_range=config.initializer_range,
        plan_tokens=config.seq_length,
        plan_packed=ms.get_context("mode") == ms.GRAPH_MODE,
    )


def mla_config(config: KimiLinearConfig) -> MlaConfig:
    """The part of a model's configuration that an MLA layer needs."""
    return MlaConfig(
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        kv_lora_rank=config.kv_lora_rank,
        qk_nope_head_dim=config.qk_nope_head_dim,
        qk_rope_head_dim=config.qk_rope_head_dim,
        v_head_dim=config.v_head_dim,
        norm_eps=config.rms_norm_eps,
        strategy=config.mla_cp_strategy,
        initializer_range=config.initializer_range,
    )


def moe_config(config: KimiLinearConfig) -> MoeConfig:
    """The part of a model's configuration that a sparse feed-forward layer needs."""
    return MoeConfig(
        hidden_size=config.hidden_size,
        intermediate_size=config.moe_intermediate_size,
        num_experts=config.num_experts,
        num_experts_per_token=config.num_experts_per_token,
        num_shared_experts=config.num_shared_experts,
        num_expert_group=config.num_expert_group,
        topk_group=config.topk_group,
        renormalize=config.moe_renormalize,
        routed_scaling_factor=config.routed_scaling_factor,
        initializer_range=config.initializer_range,
    )


class KimiLinearDecoderLayer(nn.Cell):
    """``x + attention(norm(x))``, then ``x + feed_forward(norm(x))``: KDA or MLA, SwiGLU or a mixture of experts.

    Args:
        config: The model's configuration.
        layer: Number of the layer, for its types.
        group: Ranks that share a sample.

    Inputs:
        hidden ``[B, L, D]``; cu_seqlens: boundaries of the documents in whole samples, ``[B, M + 1]`` int32, or None.

    Outputs:
        ``[B, L, D]``, the dtype of hidden.
    """

    def __init__(self, config: KimiLinearConfig, layer: int, group: CpGroup):
        super().__init__()
        self.is_kda = config.layer_types[layer] == "linear_attention"
        self.is_sparse = config.mlp_layer_types[layer] == "sparse"
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        if self.is_kda:
            self.self_attn = KdaAttention(kda_attention_config(config), group)
        else:
            self.self_attn = MultiLatentAttention(mla_config(config), group)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        if self.is_sparse:
            self.block_sparse_moe = SparseMoe(moe_config(config))
        else:
            self.block_sparse_moe = SwiGLU(config.hidden_size, config.intermediate_size, config.initializer_range)

    def construct(self, hidden_BLD, cu_seqlens=None):
        hidden_BLD = hidden_BLD + self.self_attn(self.input_layernorm(hidden_BLD), cu_seqlens)
        return hidden_BLD + self.block_sparse_moe(self.post_attention_layernorm(hidden_BLD))

    def health(self, hidden_BLD, cu_seqlens=None):
        """``(output, figures, load)``: the layer's output, and one-element tuples of what its kind of layer has to show, else empty."""
        normed_BLD = self.input_layernorm(hidden_BLD)
        figures = (self.self_attn.health(normed_BLD, cu_seqlens),) if self.is_kda else ()
        hidden_BLD = hidden_BLD + self.self_attn(normed_BLD, cu_seqlens)
        normed_BLD = self.post_attention_layernorm(hidden_BLD)
        load = (self.block_sparse_moe.load(normed_BLD),) if self.is_sparse else ()
        return hidden_BLD + self.block_sparse_moe(normed_BLD), figures, load


class KimiLinearModel(nn.Cell):
    """Embedding, decoder layers and the final norm.

    Args:
        config: The model's configuration.
        group: Ranks that share a sample.

    Inputs:
        token_ids ``[B, L]`` int32, this rank's slice; cu_seqlens as in :class:`KimiLinearDecoderLayer`.

    Outputs:
        ``[B, L, D]`` in ``config.compute_dtype``.
    """

    def __init__(self, config: KimiLinearConfig, group: CpGroup):
        super().__init__()
        self.compute_dtype = getattr(ms, config.compute_dtype)
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, config.initializer_range)
        layers = [KimiLinearDecoderLayer(config, layer, group) for layer in range(config.num_hidden_layers)]
        if config.recompute:
            for layer in layers:
                layer.recompute()
        self.layers = nn.CellList(layers)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def construct(self, token_ids_BL, cu_seqlens=None):
        hidden_BLD = self.embed_tokens(token_ids_BL).astype(self.compute_dtype)
        for layer in self.layers:
            hidden_BLD = layer(hidden_BLD, cu_seqlens)
        return self.norm(hidden_BLD)

    def health(self, token_ids_BL, cu_seqlens=None):
        """``(figures, loads)``: one tensor for each KDA layer, and one for each sparse layer."""
        hidden_BLD = self.embed_tokens(token_ids_BL).astype(self.compute_dtype)
        figures, loads = (), ()
        for layer in self.layers:
            hidden_BLD, figure, load = layer.health(hidden_BLD, cu_seqlens)
            figures, loads = figures + figure, loads + load
        return figures, loads


@MindFormerRegister.register(MindFormerModuleType.MODELS, legacy=False)
class KimiLinearForCausalLM(PreTrainedModel):
    """Kimi-Linear with the language-model head and the summed loss.

    Args:
        config: The model's configuration.
        group: Ranks that share a sample; by default all of ``config.context_parallel_size``.

    Inputs:
        input_ids, labels, loss_mask, each ``[B, T]`` int32, whole samples; labels are shifted already and negative
        where a token does not count. cu_seqlens: boundaries of the documents packed into each sample, ``[B, M + 1]`` int32 padded with T;
        None: every sample is one document.

    Outputs:
        Tuple of two float32 scalars: the sum of this slice's cross entropies, and the number of its valid tokens.
        The trainer adds both over all ranks; their quotient is the loss.

    Raises:
        ValueError: The number of launched ranks is not a multiple of ``config.context_parallel_size``, or the device lacks the kernels
            of ``config.compute_dtype``.
    """

    config_class = KimiLinearConfig
    base_model_prefix = "model"
    # Renamings that MindFormers' loading applies to a checkpoint: none, names on disk are the parameters'.
    weight_mapping = ()

    def __init__(self, config: KimiLinearConfig, group: CpGroup | None = None):
        super().__init__(config)
        if config.compute_dtype != "float32" and ms.get_context("device_target") == "CPU":
            reason = "float32 is needed on the CPU, where most of MindSpore's kernels have no 16-bit version (the KDA op itself has)"
            raise ValueError(f"compute_dtype: {config.compute_dtype!r} is not supported; {reason}")
        self.group = context_parallel_group(config.context_parallel_size) if group is None else group
        self.hidden_size = config.hidden_size
        self.vocab_size = config.vocab_size
        self.tied = bool(config.tie_word_embeddings)
        self.model = KimiLinearModel(config, self.group)
        if not self.tied:
            self.lm_head = Linear(config.hidden_size, config.vocab_size, init_std=config.initializer_range)
        self.project = ops.MatMul(transpose_b=True)
        self.loss = SummedCrossEntropy()

    def construct(self, input_ids, labels, loss_mask, cu_seqlens=None):
        begin, end = self.group.slice_bounds(input_ids.shape[1])
        logits_NV = self._logits_of_slice(input_ids[:, begin:end], cu_seqlens)
        labels_N = labels[:, begin:end].reshape((-1,))
        weights_N = valid_tokens(labels_N, loss_mask[:, begin:end].reshape((-1,)))
        return self.loss(logits_NV, labels_N, weights_N), weights_N.sum()

    def logits(self, input_ids, cu_seqlens=None):
        """Logits of this rank's slice.

        Args:
            input_ids: ``[B, T]`` int32, whole samples.
            cu_seqlens: boundaries of packed documents, or None.

        Returns:
            ``[B, L, V]`` float32.
        """
        begin, end = self.group.slice_bounds(input_ids.shape[1])
        logits_NV = self._logits_of_slice(input_ids[:, begin:end], cu_seqlens)
        return logits_NV.reshape((input_ids.shape[0], end - begin, self.vocab_size))

    def health(self, input_ids, cu_seqlens=None):
        """Figures of this rank's slice for :class:`kcp.gauges.Health`.

        Args:
            input_ids: ``[B, T]`` int32, whole samples.
            cu_seqlens: boundaries of packed documents, or None.

        Returns:
            ``([KDA layers, 7], [sparse layers, E + 1])`` float32; zeros ``[1, 1]`` for a kind of layer that the model lacks.
        """
        begin, end = self.group.slice_bounds(input_ids.shape[1])
        figures, loads = self.model.health(input_ids[:, begin:end], cu_seqlens)
        none = ops.zeros((1, 1), ms.float32)
        return ops.stack(figures) if figures else none, ops.stack(loads) if loads else none

    def health_layers(self) -> tuple[list[int], list[int]]:
        """Numbers of the KDA layers and of the sparse ones, the rows of :meth:`health`."""
        layers = list(enumerate(self.model.layers))
        return [n for n, layer in layers if layer.is_kda], [n for n, layer in layers if layer.is_sparse]

    def no_weight_decay_keywords(self) -> tuple[str, ...]:
        """Asked by MindFormers' trainer: parameters whose decay would be a change of the gate; it spares norms and biases itself."""
        return ("A_log", "dt_bias")

    def _logits_of_slice(self, token_ids_BL, cu_seqlens):
        return self.logits_of(self.model(token_ids_BL, cu_seqlens).reshape((-1, self.hidden_size)))

    def logits_of(self, hidden_ND):
        """Logits ``[N, V]`` float32 of the decoder's outputs ``[N, D]``."""
        if self.tied:
            table = self.model.embed_tokens.weight
            return self.project(hidden_ND, table.astype(hidden_ND.dtype)).astype(ms.float32)
        return self.lm_head(hidden_ND).astype(ms.float32)

    def is_moe_model(self) -> bool:
        """Asked by MindFormers' trainer."""
        return False

    def is_mtp_model(self) -> bool:
        """Asked by MindFormers' trainer."""
        return False

    def get_gpt_transformer_config(self) -> None:
        """Asked by MindFormers' trainer: there is no Megatron-style configuration behind this model."""
        return None
