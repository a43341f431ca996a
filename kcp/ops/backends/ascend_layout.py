"""Between kcp's conventions and those of Hyper-Parallel's kernels; nothing but ``ascend_stages`` uses this.

| | kcp | kernels |
|---|---|---|
| token tensors | BNSD, BSND, NTD, TND | BNSD or BSND, four axes |
| caches | any float, converted | bfloat16; gk, d_aqk, dq_raw, rstd, beta_eff float32 |
| gk | log2 or natural (``use_exp2``) | log2 |
| states | K-first or V-first, float32 | K-first, float32 |
| h, dh | ``[B, Nc, Hv, K, V]`` | the same, or with axes 1 and 2 swapped: asked once (:func:`chunk_axis`) |
| packed sequences | may be empty; boundaries may be padded with T | strictly rising host integers, and chunk_indices |
"""

from dataclasses import dataclass

import mindspore as ms
from mindspore import Tensor, ops

from kcp.ops.backends.ascend_routing import CHUNK, WIDTH
from kcp.ops.layouts import is_packed_layout
from kcp.ops.numerics import LN2

BF16, F32 = ms.bfloat16, ms.float32


def bf16(x: Tensor) -> Tensor:
    """Contiguous bfloat16."""
    return ops.cast(x, BF16).contiguous()


def f32(x: Tensor) -> Tensor:
    """Contiguous float32."""
    return ops.cast(x, F32).contiguous()


def with_batch(x: Tensor, layout: str) -> Tensor:
    """A token tensor with its batch axis (NTD and TND have none)."""
    return ops.expand_dims(x, 0) if is_packed_layout(layout) else x


def without_batch(x: Tensor, layout: str) -> Tensor:
    """Adjoint of :func:`with_batch`."""
    return ops.squeeze(x, 0) if is_packed_layout(layout) else x


def four_axes(layout: str) -> str:
    """The kernels' name of ``layout`` with a batch axis."""
    return "BNSD" if layout in ("BNSD", "NTD") else "BSND"


def log2_decay(gk: Tensor, use_exp2: bool) -> Tensor:
    """gk as the kernels take it."""
    return f32(gk if use_exp2 else gk / LN2)


@dataclass(frozen=True)
class Packing:
    """The sequences of a call.

    Attributes:
        bounds: boundaries without empty sequences, strictly rising; None: every row is one sequence.
        kept: which sequences these are, of ``count``.
        count: N.
    """

    bounds: tuple[int, ...] | None
    kept: tuple[int, ...]
    count: int

    @staticmethod
    def of(opts, cu: Tensor, batch: int) -> "Packing":
        """From the options of a call and its boundary Tensor, whose values are read."""
        if opts.cu_seqlens is None:
            return Packing(None, tuple(range(batch)), batch)
        full = tuple(cu.asnumpy().tolist()) if opts.cu_seqlens == "tensor" else opts.cu_seqlens
        kept = tuple(n for n in range(len(full) - 1) if full[n + 1] > full[n])
        return Packing((0,) + tuple(full[n + 1] for n in kept), kept, len(full) - 1)

    @staticmethod
    def rows(batch: int, num_tokens: int) -> "Packing":
        """Dense rows laid one after the other."""
        return Packing(tuple(num_tokens * b for b in range(batch + 1)), tuple(range(batch)), batch)

    def arguments(self) -> dict:
        """``cu_seqlens`` and ``chunk_indices`` (pairs sequence, chunk, flat) for a kernel."""
        if self.bounds is None:
            return {"cu_seqlens": None, "chunk_indices": None}
        pairs = []
        for n in range(len(self.kept)):
            for c in range(-(-(self.bounds[n + 1] - self.bounds[n]) // CHUNK)):
                pairs += [n, c]
        return {"cu_seqlens": list(self.bounds), "chunk_indices": pairs}

    def enter(self, states: Tensor) -> Tensor:
        """States ``[N, ...]`` of the sequences that the kernel sees."""
        if len(self.kept) == self.count:
            return f32(states)
        return f32(ops.gather(states, Tensor(self.kept, ms.int32), 0))

    def leave(self, states: Tensor, boundary: Tensor | None) -> Tensor:
        """The kernel's states for all N sequences: an empty one hands its own boundary through (None: zeros)."""
        states = ops.cast(states, F32)
        if len(self.kept) == self.count:
            return states
        kept, out = {n: i for i, n in enumerate(self.kept)}, []
        zeros = ops.zeros((1,) + states.shape[1:], F32)
        for n in range(self.count):
            through = zeros if boundary is None else ops.cast(boundary[n : n + 1], F32)
            out.append(states[kept[n] : kept[n] + 1] if n in kept else through)
        return ops.concat(tuple(out), 0)


def fold_rows(x: Tensor) -> Tensor:
    """Head-major ``[B, H, T, ...] -> [1, H, B T, ...]``, for kernels that take one row."""
    if x.shape[0] == 1:
        return x
    x = ops.swapaxes(x, 0, 1)
    return ops.expand_dims(x.reshape((x.shape[0], x.shape[1] * x.shape[2]) + x.shape[3:]), 0)


_chunk_axes: dict[object, int] = {}


def chunk_axis(symbol, states_of_one_chunk_and_two_heads) -> int:
    """Axis of the chunks in a kernel's h or dh: 1 by the document, 2 in other versions.

    Found out once a symbol: ``states_of_one_chunk_and_two_heads()`` calls it so that the shape tells (``[1, 1, 2, K, V]`` or
    ``[1, 2, 1, K, V]``).
    """
    if symbol.function not in _chunk_axes:
        shape = tuple(states_of_one_chunk_and_two_heads().shape)
        if shape not in ((1, 1, 2, WIDTH, WIDTH), (1, 2, 1, WIDTH, WIDTH)):
            raise RuntimeError(
                f"{symbol.name} returns states of shape {shape} for one chunk and two heads; "
                "known are [B, Nc, Hv, K, V] and [B, Hv, Nc, K, V]"
            )
        _chunk_axes[symbol.function] = 1 if shape[1] == 1 else 2
    return _chunk_axes[symbol.function]


def chunks_first(states: Tensor, axis: int) -> Tensor:
    """A kernel's h or dh as ``[B, Nc, Hv, K, V]``, and back."""
    return states if axis == 1 else ops.swapaxes(states, 1, 2).contiguous()
