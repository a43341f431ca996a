"""Sequences -> chunks: which tokens a chunk holds, and where states enter and leave.

Three plans with one interface. ``DensePlan``: every row of a batch is one sequence. ``HostPlan``: packed sequences whose boundaries are
known integers. ``TensorPlan``: packed sequences whose boundaries are an int32 Tensor with values unknown while the graph is compiled, so
the number of chunks is its upper bound and chunks past the end are inert. Chunks never span two sequences.

A plan holds what is known before the call; ``index(cu_seqlens)`` gives the tensors it needs at run time, handed back to every method.
"""

import mindspore as ms
import numpy as np
from mindspore import Tensor, ops


def most_chunks(num_tokens: int, num_sequences: int, chunk_size: int) -> int:
    """Most chunks that ``num_sequences`` sequences of ``num_tokens`` tokens in all can have.

    The sum of ceil(l / C) is at most (T + N (C - 1)) / C, and no chunk is empty.
    """
    return max(1, min((num_tokens + num_sequences * (chunk_size - 1)) // chunk_size, num_tokens))


def _gather_chunks(x: Tensor, token: Tensor, edge: bool, num_chunks: int) -> Tensor:
    """``[B, H, T, ...] -> [B, H, N, C, ...]``; index T reads a row of zeros (with ``edge`` no index is T)."""
    if not edge:
        x = ops.concat((x, ops.zeros(x.shape[:2] + (1,) + x.shape[3:], x.dtype)), 2)
    rows = ops.gather(x, token, 2)
    return rows.reshape(x.shape[:2] + (num_chunks, token.shape[0] // num_chunks) + x.shape[3:])


def _gather_tokens(x: Tensor, slot: Tensor) -> Tensor:
    """``[B, H, N, C, ...] -> [B, H, T, ...]``."""
    return ops.gather(x.reshape(x.shape[:2] + (x.shape[2] * x.shape[3],) + x.shape[4:]), slot, 2)


@ms.jit_class
class DensePlan:
    """``[B, H, T, ...]`` with every batch row one sequence; chunks of ``chunk_size`` tokens, the last one padded."""

    def __init__(self, num_tokens: int, chunk_size: int):
        self.num_tokens = num_tokens
        self.chunk_size = chunk_size
        self.num_chunks = -(-num_tokens // chunk_size)
        self.padding = self.num_chunks * chunk_size - num_tokens

    def index(self, cu_seqlens):
        """Run-time tensors of the plan: none."""
        return ()

    def split(self, x, index, edge=False):
        """``[B, H, T, ...] -> [B, H, N, C, ...]``; padded rows are zero, or repeat the last token with ``edge``."""
        if self.padding:
            shape = x.shape[:2] + (self.padding,) + x.shape[3:]
            rows = ops.broadcast_to(x[:, :, -1:], shape) if edge else ops.zeros(shape, x.dtype)
            x = ops.concat((x, rows), 2)
        return x.reshape(x.shape[:2] + (self.num_chunks, self.chunk_size) + x.shape[3:])

    def merge(self, x, index):
        """Inverse of :meth:`split`: ``[B, H, N, C, ...] -> [B, H, T, ...]``."""
        x = x.reshape(x.shape[:2] + (self.num_chunks * self.chunk_size,) + x.shape[4:])
        return x[:, :, : self.num_tokens] if self.padding else x

    def enter(self, state, boundary, chunk, index):
        """State at the start of ``chunk``: the sequence's own boundary state if it starts here."""
        return boundary if chunk == 0 else state

    def leave(self, states, boundary, index):
        """States after the last chunk of every sequence, from the list of states after each chunk."""
        return states[self.num_chunks - 1]

    def enter_backward(self, grad, boundary, chunk, index):
        """State gradient at the end of ``chunk``: the final state's own gradient if the sequence ends here."""
        return boundary if chunk == self.num_chunks - 1 else grad

    def leave_backward(self, grads, boundary, index):
        """Initial-state gradients, from the list (by chunk) of gradients at each chunk's start."""
        return grads[0]


@ms.jit_class
class HostPlan:
    """Packed sequences ``[1, H, T, ...]`` with boundaries known as integers ``cu_seqlens``."""

    def __init__(self, cu_seqlens: tuple[int, ...], chunk_size: int):
        cu = np.asarray(cu_seqlens, np.int64)
        lengths = np.diff(cu)
        chunks = -(-lengths // chunk_size)
        first = np.concatenate(([0], np.cumsum(chunks)))
        sequence = np.repeat(np.arange(len(lengths)), chunks)
        begin = cu[sequence] + (np.arange(first[-1]) - first[sequence]) * chunk_size
        token = begin[:, None] + np.arange(chunk_size)
        end = cu[sequence + 1][:, None]
        owner = np.repeat(np.arange(len(lengths)), lengths)
        slot = first[owner] * chunk_size + np.arange(cu[-1]) - cu[owner]
        self.chunk_size = chunk_size
        self.num_chunks = int(first[-1])
        self.sequence = tuple(int(s) for s in sequence)
        self.first = tuple(int(f) for f in first[:-1])
        self.last = tuple(int(f) - 1 for f in first[1:])
        self.lengths = tuple(int(n) for n in lengths)
        token_or_padding = np.where(token < end, token, cu[-1]).reshape(-1)
        token_or_last = np.minimum(token, end - 1).reshape(-1)
        self.tables = (Tensor(token_or_padding, ms.int32), Tensor(token_or_last, ms.int32), Tensor(slot, ms.int32))

    def index(self, cu_seqlens):
        """``(token or padding [N*C], token clamped to its sequence [N*C], slot of each token [T])``, int32 constants."""
        return self.tables

    def split(self, x, index, edge=False):
        return _gather_chunks(x, index[1] if edge else index[0], edge, self.num_chunks)

    def merge(self, x, index):
        return _gather_tokens(x, index[2])

    def enter(self, state, boundary, chunk, index):
        n = self.sequence[chunk]
        return boundary[n : n + 1] if chunk == self.first[n] else state

    def leave(self, states, boundary, index):
        out = []
        for n in range(len(self.lengths)):
            out.append(states[self.last[n]] if self.lengths[n] > 0 else boundary[n : n + 1])
        return ops.concat(tuple(out), 0)

    def enter_backward(self, grad, boundary, chunk, index):
        n = self.sequence[chunk]
        return boundary[n : n + 1] if chunk == self.last[n] else grad

    def leave_backward(self, grads, boundary, index):
        out = []
        for n in range(len(self.lengths)):
            out.append(grads[self.first[n]] if self.lengths[n] > 0 else boundary[n : n + 1])
        return ops.concat(tuple(out), 0)


@ms.jit_class
class TensorPlan:
    """Packed sequences ``[1, H, T, ...]`` with boundaries in an int32 Tensor ``[N + 1]``; one graph serves every packing."""

    def __init__(self, num_sequences: int, num_tokens: int, chunk_size: int):
        self.num_sequences = num_sequences
        self.num_tokens = num_tokens
        self.chunk_size = chunk_size
        self.num_chunks = most_chunks(num_tokens, num_sequences, chunk_size)
        self.chunk_range = Tensor(np.arange(self.num_chunks), ms.int32)
        self.token_range = Tensor(np.arange(num_tokens), ms.int32)
        self.row_range = Tensor(np.arange(chunk_size)[None], ms.int32)

    def index(self, cu_seqlens):
        """``(token or padding [N*C], clamped token [N*C], slot [T], sequence, is_first, is_last [N], empty, first, last [S])``."""
        chunk_size, num_sequences = self.chunk_size, self.num_sequences
        begin, end = cu_seqlens[:-1], cu_seqlens[1:]
        chunks = (end - begin + (chunk_size - 1)) // chunk_size
        after = ops.cast(ops.CumSum()(ops.cast(chunks, ms.float32), 0), ms.int32)  # counts below 2^24: exact
        before = after - chunks
        c = self.chunk_range
        sequence = ops.cast(after <= ops.expand_dims(c, 1), ms.int32).sum(1)
        inside = sequence < num_sequences
        sequence = ops.minimum(sequence, num_sequences - 1)
        offset = c - ops.gather(before, sequence, 0)
        token = ops.expand_dims(ops.gather(begin, sequence, 0) + offset * chunk_size, 1)
        token = token + self.row_range
        limit = ops.select(inside, ops.gather(end, sequence, 0), sequence - sequence)
        limit = ops.broadcast_to(ops.expand_dims(limit, 1), token.shape)
        token_or_padding = ops.select(token < limit, token, token - token + self.num_tokens)
        clamped = ops.maximum(ops.minimum(token, limit - 1), token - token)
        t = self.token_range
        owner = ops.cast(end <= ops.expand_dims(t, 1), ms.int32).sum(1)
        slot = ops.gather(before, owner, 0) * chunk_size + t - ops.gather(begin, owner, 0)
        is_first = ops.logical_and(inside, offset == 0)
        is_last = ops.logical_and(inside, c == ops.gather(after, sequence, 0) - 1)
        first = ops.minimum(before, self.num_chunks - 1)
        last = ops.maximum(after - 1, after - after)
        empty = (end == begin).reshape(-1, 1, 1, 1)
        return token_or_padding.reshape(-1), clamped.reshape(-1), slot, sequence, is_first, is_last, empty, first, last

    def split(self, x, index, edge=False):
        return _gather_chunks(x, index[1] if edge else index[0], edge, self.num_chunks)

    def merge(self, x, index):
        return _gather_tokens(x, index[2])

    def enter(self, state, boundary, chunk, index):
        return _boundary_or(state, boundary, chunk, index[3], index[4])

    def leave(self, states, boundary, index):
        return _pick(states, index[8], index[6], boundary)

    def enter_backward(self, grad, boundary, chunk, index):
        # chunks past the last sequence come first in the backward scan: what they carry is never used
        return _boundary_or(grad, boundary, chunk, index[3], index[5])

    def leave_backward(self, grads, boundary, index):
        return _pick(grads, index[7], index[6], boundary)


def _boundary_or(carried, boundary, chunk, sequence, flags):
    """The boundary state of the chunk's sequence where its flag is set, else what is carried (None at the scan's start)."""
    own = ops.gather(boundary, sequence[chunk : chunk + 1], 0)
    if carried is None:
        return own
    return ops.select(ops.broadcast_to(flags[chunk].reshape(1, 1, 1, 1), own.shape), own, carried)


def _pick(states, chunk, empty, boundary):
    """Per sequence, the state of one chunk; the boundary itself for sequences without tokens."""
    picked = ops.gather(ops.concat(tuple(states), 0), chunk, 0)
    return ops.select(ops.broadcast_to(empty, boundary.shape), boundary, picked)
