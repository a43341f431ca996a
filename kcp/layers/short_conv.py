"""Causal depthwise convolution of a few taps over a sliced sequence (Kimi Linear report: ShortConv before q, k and v).

y_t = silu(bias + sum_d weight[:, size-1-d] x_{t-d}),  d = 0 .. size-1;  x before a document's start is zero
"""

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops
from mindspore.ops import constexpr

from kcp.layers.fused import MAX_TAPS, layer_cell, serves
from kcp.ops.numerics import silu
from kcp.parallel.halo import Halo


@constexpr
def _positions(begin: int, end: int) -> Tensor:
    return Tensor(np.arange(begin, end)[:, None], ms.int32)


@constexpr
def _as_boundaries(cu_seqlens) -> Tensor:
    rows = cu_seqlens if isinstance(cu_seqlens[0], (list, tuple, np.ndarray)) else (cu_seqlens,)
    longest = max(len(row) for row in rows)
    return Tensor(np.array([[*row, *[row[-1]] * (longest - len(row))] for row in rows]), ms.int32)


def tokens_into_document(begin: int, end: int, cu_seqlens) -> Tensor:
    """How many tokens of its own document precede each of the tokens ``begin .. end-1``: ``[B, T_local, 1]`` int32 (B = 1 for one list).

    Args:
        begin, end: global positions of this rank's slice.
        cu_seqlens: global boundaries, host integers (one list, or one a row) or int32 Tensor ``[M+1]`` or ``[B, M+1]``.
    """
    boundaries = cu_seqlens if isinstance(cu_seqlens, Tensor) else _as_boundaries(cu_seqlens)
    if boundaries.ndim == 1:
        boundaries = ops.expand_dims(boundaries, 0)
    gaps = _positions(begin, end) - ops.expand_dims(boundaries, 1)  # [B, T_local, M+1], >= 0 for boundaries at or before the token
    return ops.ReduceMin(True)(ops.select(gaps >= 0, gaps, gaps * 0 + end), -1)


class ShortConv(nn.Cell):
    """The convolution and its silu; weights are handed in, so that q, k and v share one halo exchange.

    Args:
        group: the ranks that share a sequence.
        size: number of taps.

    Inputs:
        x ``[B, T_local, D]``; weight ``[D, 1, size]`` float32, newest tap last; bias ``[D]`` or None; cu_seqlens: global boundaries
        of packed documents as :class:`~kcp.layers.kda_core.KdaCore` takes them, or None.

    Outputs:
        ``[B, T_local, D]``, the dtype of x.
    """

    def __init__(self, group, size: int):
        super().__init__(auto_prefix=False)
        if size < 1:
            raise ValueError(f"size is {size}; allowed: at least 1 tap")
        self.group = group
        self.size = size
        self.halo = Halo(group, size - 1)
        self.no_bias, self.no_boundary = Tensor([0.0], ms.float32), Tensor([0], ms.int32)

    def construct(self, x, weight, bias=None, cu_seqlens=None):
        halo = self.halo(ops.cast(x, ms.float32)) if self.size > 1 else None
        return self.convolve(x, halo, weight, bias, self._into(x.shape[1], cu_seqlens))

    def convolve(self, x, halo, weight, bias=None, into=None):
        """The convolution after the tokens ``halo [B, size-1, D]``; ``into`` as :func:`tokens_into_document` gives it, or None."""
        num_tokens = x.shape[1]
        dtype = x.dtype
        x = ops.cast(x, ms.float32)
        if 1 < self.size <= MAX_TAPS and serves(x.shape):
            y = layer_cell("Conv", bias is not None, into is not None)(
                x, halo, weight, self.no_bias if bias is None else bias, self.no_boundary if into is None else into
            )
            return ops.cast(y, dtype)
        taps = weight.reshape(weight.shape[0], self.size)
        y = x * taps[:, self.size - 1]
        if self.size > 1:
            extended = ops.concat((halo, x), 1)
            for d in range(1, self.size):
                earlier = extended[:, self.size - 1 - d : self.size - 1 - d + num_tokens]
                if into is not None:
                    earlier = earlier * ops.cast(into >= d, ms.float32)
                y = y + earlier * taps[:, self.size - 1 - d]
        if bias is not None:
            y = y + bias
        return ops.cast(silu(y), dtype)

    def _into(self, num_tokens, cu_seqlens):
        """:func:`tokens_into_document` of this rank's slice; None without boundaries."""
        if cu_seqlens is None:
            return None
        begin = sum(self.group.lengths(num_tokens)[: self.group.rank])
        return tokens_into_document(begin, begin + num_tokens, cu_seqlens)
