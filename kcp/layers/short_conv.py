"""Causal depthwise convolution of a few taps over a sliced sequence (Kimi Linear report: ShortConv before q, k and v).

y_t = silu(bias + sum_d weight[:, size-1-d] x_{t-d}),  d = 0 .. size-1;  x before a document's start is zero
"""

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops
from mindspore.common._grad_function import _Function
from mindspore.ops import constexpr

from kcp.layers.fused import MAX_TAPS, layer_cell, serves
from kcp.ops.numerics import in_graph, silu, silu_grad, total
from kcp.parallel.halo import Halo

BLOCK = 1 << 20  # numbers; PyNative works on larger inputs in blocks of tokens


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


def _windows(extended, taps, bias, into):
    """``(sum over the taps [B, n, D], window of every tap, newest first)`` of tokens with their halo, ``[B, size - 1 + n, D]``."""
    size = taps.shape[1]
    num_tokens = extended.shape[1] - size + 1
    windows, y = [], 0.0
    for d in range(size):
        window = extended[:, size - 1 - d : size - 1 - d + num_tokens]
        if into is not None and d > 0:
            window = window * ops.cast(into >= d, ms.float32)
        windows.append(window)
        y = y + window * taps[:, size - 1 - d]
    return (y if bias is None else y + bias), windows


class _Blocks(_Function):
    """The convolution and its silu in PyNative, a block of tokens at a time: keeps its inputs alone."""

    @staticmethod
    def forward(ctx, extended, taps, bias, into, block):
        ctx.save_for_backward(extended, taps)
        ctx.bias, ctx.into, ctx.block = bias, into, block
        size, num_tokens = taps.shape[1], extended.shape[1] - taps.shape[1] + 1
        parts = []
        for i, j in _spans(num_tokens, block):
            part = None if into is None else into[:, i:j]
            parts.append(silu(_windows(extended[:, i : j + size - 1], taps, bias, part)[0]))
        return ops.concat(tuple(parts), 1)

    @staticmethod
    def backward(ctx, grad):
        extended, taps = ctx.saved_tensors
        bias, into, size = ctx.bias, ctx.into, taps.shape[1]
        d_taps, d_bias, parts, carry = 0.0, 0.0, [], None
        for i, j in _spans(extended.shape[1] - size + 1, ctx.block):
            part = None if into is None else into[:, i:j]
            y, windows = _windows(extended[:, i : j + size - 1], taps, bias, part)
            dy = silu_grad(y, grad[:, i:j])
            d_taps = d_taps + ops.stack([total(dy * window, (0, 1)) for window in reversed(windows)], 1)
            d_bias = d_bias + total(dy, (0, 1))
            d_extended = 0.0
            for d in range(size):
                d_window = dy * taps[:, size - 1 - d]
                if part is not None and d > 0:
                    d_window = d_window * ops.cast(part >= d, ms.float32)
                around = [ops.zeros((dy.shape[0], n, dy.shape[2]), ms.float32) for n in (size - 1 - d, d)]
                d_extended = d_extended + ops.concat((around[0], d_window, around[1]), 1)
            if carry is not None:  # what this block's first tokens and the last block's halo share
                parts.append(d_extended[:, : size - 1] + carry)
                d_extended = d_extended[:, size - 1 :]
            parts.append(d_extended[:, : d_extended.shape[1] - size + 1])
            carry = d_extended[:, d_extended.shape[1] - size + 1 :]
        return ops.concat((*parts, carry), 1), d_taps, None if bias is None else d_bias, None, None


def _spans(num_tokens, block):
    """Blocks of tokens ``(begin, end)``; the last one has what is left over."""
    starts = range(0, max(1, num_tokens // block)) if num_tokens else ()
    return [(n * block, (n + 1) * block if n < len(starts) - 1 else num_tokens) for n in starts]


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
        self.block = BLOCK
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
        if self.size > 1:
            extended = ops.concat((halo, x), 1)
            if not in_graph() and num_tokens * x.shape[2] > self.block:
                return ops.cast(_Blocks.apply(extended, taps, bias, into, max(self.size, self.block // x.shape[2])), dtype)
        y = x * taps[:, self.size - 1]
        if self.size > 1:
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
