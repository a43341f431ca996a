"""Multi-head latent attention without positional encoding, over a sliced sequence (Kimi Linear report: the NoPE MLA layers).

    q_h = x W_q                                   [nope + rope] widths a head; nothing is rotated
    [c | k_r] = x W_kva ;  c = RMSNorm(c)         latent [kv_lora_rank] and one shared key part [rope]
    [k_h | v_h] = c W_kvb                         [nope | v] widths a head
    o_h = softmax(q_h [k_h | k_r]^T (nope + rope)^-1/2) v_h,  causal within a document ;  y = o W_o

Under context parallelism queries stay, and either the latent ``[c | k_r]`` of all tokens is gathered (``latent_gather``: kv_lora_rank +
rope numbers a token, any number of heads), or heads are exchanged for tokens (``ulysses``: the heads must divide).
"""

from dataclasses import dataclass

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops
from mindspore.ops import constexpr

from kcp.layers.fused import layer_cell, serves
from kcp.layers.linear import Linear
from kcp.layers.norms import RMSNorm
from kcp.layers.short_conv import tokens_into_document
from kcp.ops import numerics
from kcp.parallel.degrees import check_heads
from kcp.parallel.gather import GatherSequence
from kcp.parallel.group import CpGroup
from kcp.parallel.ulysses import HeadsToSequence, SequenceToHeads

STRATEGIES = ("none", "ulysses", "latent_gather")


@dataclass(frozen=True)
class MlaConfig:
    """Configuration of :class:`MultiLatentAttention`.

    Attributes:
        hidden_size: width D of the residual stream.
        num_heads: attention heads.
        kv_lora_rank: width of the latent.
        qk_nope_head_dim, qk_rope_head_dim: the two parts of a query or key head; nothing is rotated.
        v_head_dim: width of a value head.
        norm_eps: epsilon of the latent's RMSNorm.
        strategy: ``"none"``, ``"ulysses"`` or ``"latent_gather"``.
        initializer_range: standard deviation of the projections' start.
    """

    hidden_size: int
    num_heads: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    norm_eps: float = 1e-5
    strategy: str = "none"
    initializer_range: float = 0.02

    def __post_init__(self):
        for name in ("hidden_size", "num_heads", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} is {value!r}; allowed: an integer >= 1")
        if self.strategy not in STRATEGIES:
            raise ValueError(f"strategy is {self.strategy!r}; allowed: {', '.join(map(repr, STRATEGIES))}")


@constexpr
def _distances(begin: int, end: int, total: int) -> Tensor:
    """Query position minus key position ``[1, 1, Tq, T]``."""
    return Tensor((np.arange(begin, end)[:, None] - np.arange(total)[None])[None, None], ms.int32)


def causal_attention(q: Tensor, k: Tensor, v: Tensor, begin: int, into) -> Tensor:
    """Softmax attention of queries ``begin .. begin + Tq - 1`` over all earlier tokens of their own document, float32.

    Args:
        q: ``[B, Tq, H, D]``, scaled; k ``[B, T, H, D]``; v ``[B, T, H, V]``.
        into: tokens of its document before each query ``[B or 1, Tq, 1]`` int32, or None for one document.

    Returns:
        ``[B, Tq, H, V]``.
    """
    if q.shape[1] == 0:
        return v[:, :0]
    q, k, v = ops.transpose(q, (0, 2, 1, 3)), ops.transpose(k, (0, 2, 1, 3)), ops.transpose(v, (0, 2, 1, 3))
    if serves(q.shape):
        return ops.transpose(_attention_by_blocks(q, k, v, begin, into), (0, 2, 1, 3))
    distance = _distances(begin, begin + q.shape[2], k.shape[2])
    seen = distance >= 0
    if into is not None:
        seen = ops.logical_and(seen, distance <= ops.expand_dims(into, 1))
    scores = numerics.matmul(q, k, transpose_b=True)
    visible = ops.cast(seen, ms.float32)
    scores = scores * visible - 1e30 * (1.0 - visible)
    weights = numerics.exp(scores - ops.stop_gradient(scores.max(-1, keepdims=True))) * visible
    weights = weights / weights.sum(-1, keepdims=True)
    return ops.transpose(numerics.matmul(weights, v), (0, 2, 1, 3))


@constexpr
def _query_blocks(num_queries: int) -> tuple:
    """``(first, last)`` of blocks of queries, at most 16 and at least 256 queries each."""
    size = max(256, -(-num_queries // 16))
    return tuple((first, min(first + size, num_queries)) for first in range(0, num_queries, size))


def _attention_by_blocks(q, k, v, begin, into):
    """:func:`causal_attention` for head-major tensors, a block of queries at a time against the keys up to the block's end."""
    outs = ()
    nothing = ops.zeros((1,), ms.int32)
    for first, last in _query_blocks(q.shape[2]):
        end = begin + last
        scores = numerics.matmul(q[:, :, first:last], k[:, :, :end], transpose_b=True)
        weights = layer_cell("Softmax", begin + first, into is not None)(scores, nothing if into is None else into[:, first:last])
        outs = outs + (numerics.matmul(weights, v[:, :, :end]),)
    return outs[0] if len(outs) == 1 else ops.concat(outs, 2)


class MultiLatentAttention(nn.Cell):
    """One MLA layer over this rank's slice of every sequence.

    Args:
        config: a :class:`MlaConfig`.
        group: the ranks that share every sequence; None: one rank.

    Inputs:
        hidden_states ``[B, T_local, D]``; cu_seqlens: global boundaries of packed documents as
        :class:`~kcp.layers.kda_core.KdaCore` takes them, or None.

    Outputs:
        ``[B, T_local, D]``, the dtype of hidden_states.

    Parameters, named as in a Hugging Face ``kimi_linear`` checkpoint: ``q_proj``, ``kv_a_proj_with_mqa``, ``kv_a_layernorm``,
    ``kv_b_proj``, ``o_proj``.

    Raises:
        ValueError: strategy ``none`` over several ranks, or heads that ``ulysses`` can't divide.
    """

    def __init__(self, config: MlaConfig, group: CpGroup | None = None):
        super().__init__()
        group = CpGroup.single() if group is None else group
        if config.strategy == "none" and group.size > 1:
            raise ValueError(f"strategy is 'none' with a group of {group.size} ranks; allowed: 'ulysses' or 'latent_gather'")
        if config.strategy == "ulysses":
            check_heads(group.size, num_heads=config.num_heads)
        self.group = group
        self.ulysses = config.strategy == "ulysses" and group.size > 1
        self.num_heads, self.rank_width = config.num_heads, config.kv_lora_rank
        self.nope, self.rope, self.value_width = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
        self.scale = (self.nope + self.rope) ** -0.5
        hidden, std = config.hidden_size, config.initializer_range
        self.q_proj = Linear(hidden, self.num_heads * (self.nope + self.rope), init_std=std)
        self.kv_a_proj_with_mqa = Linear(hidden, self.rank_width + self.rope, init_std=std)
        self.kv_a_layernorm = RMSNorm(self.rank_width, config.norm_eps)
        self.kv_b_proj = Linear(self.rank_width, self.num_heads * (self.nope + self.value_width), init_std=std)
        self.o_proj = Linear(self.num_heads * self.value_width, hidden, init_std=std)
        self.gather = GatherSequence(group)
        self.to_heads, self.to_sequence = SequenceToHeads(group), HeadsToSequence(group)

    def construct(self, hidden_states, cu_seqlens=None):
        x = hidden_states
        tokens = x.shape[:2]
        q, latent = self.queries_and_latent(x)
        lengths = self.group.lengths(tokens[1])
        begin, total = sum(lengths[: self.group.rank]), sum(lengths)
        if self.ulysses:
            k, v = self.keys_and_values(latent)
            whole = self.to_heads(ops.concat((q, k, v), -1))
            width = self.nope + self.rope
            q, k, v = whole[..., :width], whole[..., width : 2 * width], whole[..., 2 * width :]
            out = causal_attention(q, k, v, 0, self._into(0, total, cu_seqlens))
            out = self.to_sequence(out, x)
        else:
            if self.group.size > 1:
                latent = self.gather(latent)
            k, v = self.keys_and_values(latent)
            out = causal_attention(q, k, v, begin, self._into(begin, begin + tokens[1], cu_seqlens))
        return self.o_proj(ops.cast(out.reshape(tokens + (self.num_heads * self.value_width,)), x.dtype))

    def queries_and_latent(self, x):
        """Scaled queries ``[B, T, H, nope + rope]`` and the latent ``[c | k_r]`` ``[B, T, rank + rope]``, float32."""
        q = (ops.cast(self.q_proj(x), ms.float32) * self.scale).reshape(x.shape[:2] + (self.num_heads, self.nope + self.rope))
        latent = ops.cast(self.kv_a_proj_with_mqa(x), ms.float32)
        return q, ops.concat((self.kv_a_layernorm(latent[..., : self.rank_width]), latent[..., self.rank_width :]), -1)

    def _into(self, begin, end, cu_seqlens):
        return None if cu_seqlens is None else tokens_into_document(begin, end, cu_seqlens)

    def keys_and_values(self, latent):
        """``(k [B, T, H, nope + rope], v [B, T, H, V])`` from ``[c | k_r]``."""
        tokens = latent.shape[:2]
        up = self.kv_b_proj(latent[..., : self.rank_width]).reshape(tokens + (self.num_heads, self.nope + self.value_width))
        shared = ops.broadcast_to(ops.expand_dims(latent[..., self.rank_width :], 2), tokens + (self.num_heads, self.rope))
        return ops.concat((up[..., : self.nope], shared), -1), up[..., self.nope :]
