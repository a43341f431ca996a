"""KDA and MLA layers inside MindFormers' stock mcore ``GPTModel``: cells for its ``ModuleSpec``, and a block spec that mixes them.

    spec = hybrid_block_spec(config, ["linear_attention", "linear_attention", "full_attention"], kda, mla)
    model = GPTModel(config, spec, vocab_size, max_sequence_length, position_embedding_type="none")

Mcore layers are handed sequence-major activations ``[S, B, H]`` (SBH) and run in graph mode only. Under context parallelism S is this
rank's slice: pass the group, and slice input_ids, labels and loss_mask before the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mindformers.parallel_core.training_graph.base_models.gpt.gpt_layer_specs import get_mlp_module_spec
from mindformers.parallel_core.training_graph.transformer.norm import get_norm_cls
from mindformers.parallel_core.training_graph.transformer.transformer_block import TransformerBlockSubmodules
from mindformers.parallel_core.training_graph.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from mindformers.parallel_core.utils.spec_utils import ModuleSpec
from mindspore import nn, ops

from kcp.layers.kda_attention import KdaAttention, KdaAttentionConfig
from kcp.layers.linear import Embedding
from kcp.layers.mla import MlaConfig, MultiLatentAttention
from kcp.parallel.group import CpGroup

LAYER_TYPES = ("linear_attention", "full_attention")


class _SequenceMajor(nn.Cell):
    """An attention of kcp with mcore's arguments: ``[S, B, H]`` in and out, one document a row."""

    def __init__(self, attention: nn.Cell, hidden_size: int, config: Any):
        super().__init__()
        if hidden_size != config.hidden_size:
            raise ValueError(f"hidden_size is {hidden_size}; allowed: {config.hidden_size}, as in the transformer's configuration")
        self.attention = attention

    def construct(
        self,
        hidden_states,
        attention_mask=None,
        key_value_states=None,
        rotary_pos_emb=None,
        prefix_keys_values=None,
        actual_seq_len=None,
        sharded_key=None,
        sharded_value=None,
    ):
        out = self.attention(ops.transpose(hidden_states, (1, 0, 2)))
        return ops.transpose(out, (1, 0, 2)), None


class KdaSelfAttention(_SequenceMajor):
    """KDA in place of mcore's ``SelfAttention``.

    Args:
        config: mcore's ``TransformerConfig``; its hidden_size must be that of ``kda``.
        layer_number: given by mcore, not used.
        kda: the layer's configuration, from the spec's ``params``.
        group: the ranks that share every sequence, from the spec's ``params``; None: one rank.
        submodules: given by mcore when the spec names some; not used.

    Inputs:
        hidden_states ``[S, B, H]``; mcore's other arguments (mask, rotary embedding, prefixes) have no part in KDA.

    Outputs:
        ``([S, B, H], None)``: the output and mcore's bias, which there is none of.

    Raises:
        ValueError: the hidden sizes differ.
    """

    def __init__(self, config: Any, kda: KdaAttentionConfig, layer_number: int = 1, group: CpGroup | None = None, submodules: Any = None):
        super().__init__(KdaAttention(kda, group), kda.hidden_size, config)


class MlaSelfAttention(_SequenceMajor):
    """MLA without positions (:class:`~kcp.layers.mla.MultiLatentAttention`) with the arguments of :class:`KdaSelfAttention`; ``mla`` in
    place of ``kda``."""

    def __init__(self, config: Any, mla: MlaConfig, layer_number: int = 1, group: CpGroup | None = None, submodules: Any = None):
        super().__init__(MultiLatentAttention(mla, group), mla.hidden_size, config)


def layer_spec(config: Any, attention: ModuleSpec | type) -> ModuleSpec:
    """The stock ``TransformerLayer`` around an attention: norms and feed-forward as ``config`` asks for."""
    norm = get_norm_cls(config.fused_norm)
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm,
            self_attention=attention,
            pre_mlp_layernorm=norm,
            mlp=get_mlp_module_spec(use_interleaved_weight_layout_mlp=config.use_interleaved_weight_layout_mlp),
        ),
    )


def hybrid_block_spec(
    config: Any,
    layer_types: Sequence[str],
    kda: KdaAttentionConfig,
    full_attention: MlaConfig | ModuleSpec,
    group: CpGroup | None = None,
) -> TransformerBlockSubmodules:
    """Specs of all layers of a ``GPTModel``.

    Args:
        config: mcore's ``TransformerConfig`` with ``num_layers`` layers.
        layer_types: ``"linear_attention"`` or ``"full_attention"`` for each layer.
        kda: configuration of the KDA layers.
        full_attention: configuration of MLA layers, or any spec of a self-attention, MindFormers' own included.
        group: the ranks that share every sequence; None: one rank.

    Returns:
        What ``GPTModel(transformer_layer_spec=...)`` takes.

    Raises:
        ValueError: an unknown layer type, or not one for each layer.
    """
    if len(layer_types) != config.num_layers:
        raise ValueError(f"layer_types has {len(layer_types)} entries; allowed: {config.num_layers}, one for each layer")
    for number, kind in enumerate(layer_types):
        if kind not in LAYER_TYPES:
            raise ValueError(f"layer_types[{number}] is {kind!r}; allowed: {', '.join(map(repr, LAYER_TYPES))}")
    if isinstance(full_attention, MlaConfig):
        full_attention = ModuleSpec(module=MlaSelfAttention, params={"mla": full_attention, "group": group})
    specs = {
        "linear_attention": layer_spec(config, ModuleSpec(module=KdaSelfAttention, params={"kda": kda, "group": group})),
        "full_attention": layer_spec(config, full_attention),
    }
    return TransformerBlockSubmodules(layer_specs=[specs[kind] for kind in layer_types], layer_norm=get_norm_cls(config.fused_norm))


def use_gather_embedding(model: nn.Cell, initializer_range: float = 0.02) -> None:
    """Give a ``GPTModel`` kcp's embedding: MindFormers' own has no gradient on the CPU.

    Args:
        model: a ``GPTModel`` whose parameters no optimizer holds yet.
        initializer_range: standard deviation that the new table starts from.
    """
    old = model.embedding.word_embeddings.weight
    model.embedding.word_embeddings = Embedding(*old.shape, initializer_range)
    model.embedding.word_embeddings.weight.name = old.name
