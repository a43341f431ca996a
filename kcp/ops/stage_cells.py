"""What the nine public stages share: argument checks, and the Cells that run a stage and refuse a gradient through it."""

from functools import lru_cache

import mindspore as ms
from mindspore import nn, ops
from mindspore.ops import constexpr

from kcp.ops import backends
from kcp.ops.chunk_kda import boundaries_of, check_boundary_info
from kcp.ops.layouts import LAYOUTS, is_packed_layout
from kcp.ops.numerics import in_graph
from kcp.ops.options import (
    BACKWARD_MODES,
    CHUNK_SIZES,
    STORAGE,
    KdaOptions,
    check_choice,
    check_chunk_indices,
    check_chunk_size,
    check_cu_seqlens,
    check_flag,
    check_inputs,
    check_tensor,
    describe,
    require_tensor,
    token_dims,
)
from kcp.ops.sequences import most_chunks

CACHE_SLOTS = {  # backward_mode -> positions of the thirteen caches that are returned
    "none": (0, 1, 3, 4, 6, 7),
    "forward": (0, 1, 2, 3, 4, 6, 7),
    "recompute": (0, 1, 3, 4, 6, 7, 8, 9, 10, 11, 12),
    "save": tuple(range(13)),
}
RSTD_SLOTS = (10, 11)
FLOAT32 = ("Float32",)


@constexpr(check=False)
def refuse_gradient(stage):
    raise TypeError(
        f"chunk_kda_{stage} is not differentiable; allowed: chunk_kda for automatic gradients, or the backward stages called explicitly"
    )


class Stage(nn.Cell):
    """One stage with its options fixed; a gradient through it is refused."""

    def __init__(self, stage, opts, backend):
        super().__init__(auto_prefix=False)
        self.stage = stage
        self.opts = opts
        self.run = getattr(backend, stage)

    def construct(self, tensors):
        return self.run(self.opts, *tensors)

    def bprop(self, tensors, out, dout):
        refuse_gradient(self.stage)
        return (tensors,)


@lru_cache(512)
def cached_stage(stage, opts, backend):
    return Stage(stage, opts, backend)


def stage_cell(stage, names, values, cu, boundaries, num_tokens, batch, chunk_indices):
    """The Cell of a stage for options ``names = values``; ``cu`` host boundaries or None, ``boundaries`` (shape, dtype) of a Tensor."""
    return checked_stage(stage, names, values, cu, boundaries, num_tokens, batch, chunk_indices, in_graph())


@constexpr(check=False)
def checked_stage(stage, names, values, cu, boundaries, num_tokens, batch, chunk_indices, compiled):
    """Check the options of a stage and give its Cell."""
    options = dict(zip(names, values, strict=True))
    options["scale"] = options.get("scale", 1.0)
    if (cu is not None or boundaries is not None) and batch != 1:
        raise ValueError(f"cu_seqlens is given with B={batch}; allowed: B=1 (flatten the batch into one pack)")
    if cu is not None:
        cu = check_cu_seqlens(cu, num_tokens)
    elif boundaries is not None:
        check_boundary_info(boundaries)
        cu = "tensor"
    check_chunk_indices(chunk_indices, cu, options.get("chunk_size", 64))
    opts = KdaOptions(cu_seqlens=cu, **options)
    return cached_stage(stage, opts, backends.select(stage, compiled))


def check_stage(names, tensors, optional, dims, dtypes, cu_seqlens, chunk_size):
    """Check the caches of a stage against each other, the boundaries and the chunks.

    Args:
        names, tensors, dims, dtypes: parallel tuples, see :func:`check_caches`.
        optional: names that may be None.
        chunk_size: None if the width C of a cache gives it.

    Returns:
        ``(host boundaries or None, boundary Tensor or None)``.
    """
    infos = ()
    for i in range(len(names)):
        require_tensor(names[i], tensors[i], names[i] in optional)
        infos = infos + (describe(tensors[i]),)
    host, tensor = boundaries_of(cu_seqlens)
    values = host
    if tensor is not None and not in_graph():
        values = tuple(tensor.asnumpy().reshape(-1).tolist())
    check_caches(names, infos, dims, dtypes, values, describe(tensor), chunk_size)
    return host, tensor


@constexpr(check=False)
def check_caches(names, infos, dims, dtypes, boundaries, boundary_info, chunk_size):
    """Check caches against each other: parallel tuples of names, ``(shape, dtype)`` or None, axis names (alternatives of another rank
    after ``|``) and allowed dtypes; ``boundaries`` their values where known, ``boundary_info`` (shape, dtype) of a boundary Tensor."""
    sizes = {}
    if chunk_size is not None:
        check_chunk_size(chunk_size)
        sizes["C"] = chunk_size
    if boundary_info is not None:
        sizes["N"] = check_boundary_info(boundary_info)
    elif boundaries is not None:
        sizes["N"] = len(boundaries) - 1
    for name, info, axes, allowed in zip(names, infos, dims, dtypes, strict=True):
        if info is not None:
            ways = [way for way in axes.split("|") if len(way.split()) == len(info[0])]
            check_tensor(name, info, ways[0] if ways else axes.split("|")[0], sizes, allowed)
        if "B" in sizes:
            sizes.setdefault("N", sizes["B"])
        if "Hv" in sizes and "K" in sizes:
            sizes["Hv*K"] = sizes["Hv"] * sizes["K"]
    if "Hk" in sizes and sizes["Hv"] % sizes["Hk"]:
        raise ValueError(f"v has Hv={sizes['Hv']} heads, q and k Hk={sizes['Hk']}; allowed: Hv a multiple of Hk")
    if sizes.get("C", 64) not in CHUNK_SIZES:
        raise ValueError(f"{names[dims.index('B Hv T C')]} has C={sizes['C']}; allowed: {', '.join(str(c) for c in CHUNK_SIZES)}")
    if boundaries is not None:
        boundaries = check_cu_seqlens(boundaries, sizes["T"])
    if "Nc" in sizes:
        expected = count_chunks(boundaries, boundary_info, sizes["T"], sizes["C"])
        if sizes["Nc"] != expected:
            raise ValueError(
                f"h has Nc={sizes['Nc']} chunks; allowed: {expected}, the chunks of {sizes['C']} tokens that hold T={sizes['T']}"
            )


def count_chunks(boundaries, boundary_info, num_tokens, chunk_size):
    """Nc, the number of chunks of a call; for a boundary Tensor in a graph its upper bound."""
    if boundaries is None and boundary_info is not None:
        return most_chunks(num_tokens, boundary_info[0][0] - 1, chunk_size)
    starts = (0, num_tokens) if boundaries is None else boundaries
    return sum(-(-(starts[i + 1] - starts[i]) // chunk_size) for i in range(len(starts) - 1))


def checked_boundaries(cu_seqlens, num_tokens):
    """``(host tuple or None, Tensor or None)``, a Tensor's values checked where they are known."""
    host, tensor = boundaries_of(cu_seqlens)
    if tensor is not None and not in_graph():
        check_cu_seqlens(tensor.asnumpy().tolist(), num_tokens)
    return host, tensor


def or_placeholder(x):
    return ops.zeros((1,), ms.float32) if x is None else x


@constexpr(check=False)
def check_prepare(tensors, layout, cu_length, backward_mode):
    q, k, v, g, beta, a_log, dt_bias = tensors
    check_choice("backward_mode", backward_mode, BACKWARD_MODES)
    check_choice("layout", layout, LAYOUTS)
    sizes = check_inputs(layout, q, k, v, g, beta, a_log, dt_bias, None, False, cu_length)
    return sizes["T"], sizes["B"], sizes["K"]


@constexpr(check=False)
def check_layout(name, layout, batch):
    """Check a layout argument against the batch of the caches."""
    check_choice(name, layout, LAYOUTS)
    if is_packed_layout(layout) and batch != 1:
        raise ValueError(f"{name} is {layout!r}, which has no batch axis, with B={batch}; allowed: 'BNSD', 'BSND', or B=1")


@constexpr(check=False)
def check_d_o(info, v_new, layout):
    b, hv, t, v = v_new[0]
    check_tensor("d_o", info, token_dims(layout, "Hv", "V"), {"B": b, "Hv": hv, "T": t, "V": v}, STORAGE)


@constexpr(check=False)
def check_norm_pair(no_q, no_k):
    if no_q != no_k:
        raise ValueError("q_rstd and k_rstd: one is None, the other is not; allowed: both (in-kernel norm) or neither")


@constexpr(check=False)
def check_merge(state, summaries, count, rank, forward, state_v_first):
    """Check a merge; returns the ranks in the order they are applied."""
    check_flag("forward", forward)
    check_flag("state_v_first", state_v_first)
    for name, value in (("pre_or_post_num_ranks", count), ("rank", rank)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} is {value!r} of type {type(value).__name__}; allowed: an integer")
    batch = "N " if len(state[0]) == 4 else ""
    sizes = {}
    check_tensor("state", state, batch + ("Hv V K" if state_v_first else "Hv K V"), sizes, FLOAT32)
    sizes["V+K"] = sizes["V"] + sizes["K"]
    check_tensor("summaries", summaries, "S " + batch + "Hv K V+K", sizes, FLOAT32)
    if not 0 <= rank < sizes["S"]:
        raise ValueError(f"rank is {rank}; allowed: 0 to {sizes['S'] - 1}, there are S={sizes['S']} summaries")
    limit = rank if forward else sizes["S"] - 1 - rank
    if not 0 <= count <= limit:
        side = "before" if forward else "after"
        raise ValueError(f"pre_or_post_num_ranks is {count}; allowed: 0 to {limit}, the ranks {side} rank {rank} of {sizes['S']}")
    return tuple(range(rank - count, rank)) if forward else tuple(range(rank + count, rank, -1))


class Merge(nn.Cell):
    """The merge of fixed ranks; a gradient through it is refused."""

    def __init__(self, opts, ranks, backend):
        super().__init__(auto_prefix=False)
        self.opts = opts
        self.ranks = ranks
        self.run = backend.merge_fwd_bwd

    def construct(self, summaries):
        return self.run(self.opts, summaries, self.ranks)

    def bprop(self, summaries, out, dout):
        refuse_gradient("merge_fwd_bwd")
        return (summaries,)


@lru_cache(256)
def cached_merge(state_v_first, ranks, backend):
    return Merge(KdaOptions(1.0, safe_gate=True, state_v_first=state_v_first), ranks, backend)


@constexpr(check=False)
def merge_cell(state_v_first, ranks, compiled):
    return cached_merge(state_v_first, ranks, backends.select("merge_fwd_bwd", compiled))
