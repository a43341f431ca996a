"""The nine stages on Hyper-Parallel's kernels, with the arguments of the backend protocol and results in the kernels' own types.

Caches may arrive in any float type; what a kernel stores as bfloat16 is rounded to it here. Every function raises
:class:`~kcp.ops.backends.ascend_symbols.Refused` with the exact limit before anything is launched that the kernels would not take.
"""

import os

import mindspore as ms
from mindspore import Tensor, ops

from kcp.ops.backends.ascend_layout import (
    F32,
    Packing,
    bf16,
    chunk_axis,
    chunks_first,
    f32,
    fold_rows,
    four_axes,
    log2_decay,
    with_batch,
    without_batch,
)
from kcp.ops.backends.ascend_routing import CHUNK, WIDTH, dtype_limit, finalize_limit, sizes_limit
from kcp.ops.backends.ascend_symbols import Refused, Symbol, find
from kcp.ops.layouts import expand_heads, reduce_heads, transpose_state
from kcp.ops.numerics import LN2, sigmoid

STATE_DTYPE_VARIABLE = "KCP_ASCEND_STATE_DTYPE"


def _symbol(stage: str) -> Symbol:
    found = find(stage)
    if isinstance(found, str):
        raise Refused(found)
    return found


def _require(limit: str | None) -> None:
    if limit is not None:
        raise Refused(limit)


def _sizes(opts, key_width: int, value_width: int) -> None:
    _require(sizes_limit(key_width, value_width, opts.chunk_size))


def state_dtype():
    """Type in which boundary states are handed to the kernels: float32, or what ``KCP_ASCEND_STATE_DTYPE`` says (some versions take
    bfloat16 alone)."""
    name = os.environ.get(STATE_DTYPE_VARIABLE, "") or "float32"
    if name not in ("float32", "bfloat16"):
        raise ValueError(f"{STATE_DTYPE_VARIABLE} is {name!r}; allowed: float32, bfloat16")
    return F32 if name == "float32" else ms.bfloat16


def _boundary(packing: Packing, states: Tensor, v_first: bool) -> Tensor:
    return ops.cast(packing.enter(transpose_state(states, v_first)), state_dtype()).contiguous()


def _placeholder() -> Tensor:
    return ops.zeros((1,), F32)


# ---- forward


def fwd_prepare(opts, q, k, v, g, beta, a_log, dt_bias, cu):
    """The thirteen caches; q_rstd and k_rstd are placeholders without the in-kernel norm."""
    symbol = _symbol("fwd_prepare")
    _require(dtype_limit("q, k and v", v.dtype))
    _sizes(opts, q.shape[-1], v.shape[-1])
    q, k, v, g, beta = (with_batch(x, opts.layout) for x in (q, k, v, g, beta))
    layout = four_axes(opts.layout)
    heads = v.shape[1] if layout == "BNSD" else v.shape[2]
    if opts.use_gate_in_kernel and not opts.has_a_log:
        a_log = ops.zeros((heads,), F32)  # the lower-bound gate without a_log: exp(0) = 1
    caches = symbol(
        q=bf16(q), k=bf16(k), v=bf16(v), g=_gate_input(g), beta=_gate_input(beta), scale=opts.scale, chunk_size=opts.chunk_size,
        layout=layout, a_log=f32(a_log) if opts.use_gate_in_kernel else None,
        dt_bias=f32(dt_bias.reshape((-1,))) if opts.has_dt_bias else None, epsilon=opts.epsilon,
        use_qk_l2norm_in_kernel=opts.use_qk_l2norm_in_kernel, use_gate_in_kernel=opts.use_gate_in_kernel,
        use_beta_sigmoid_in_kernel=opts.use_beta_sigmoid_in_kernel, allow_neg_eigval=opts.allow_neg_eigval,
        safe_gate=opts.safe_gate and opts.use_gate_in_kernel, lower_bound=opts.lower_bound, use_exp2=True, backward_mode="save",
        **Packing.of(opts, cu, v.shape[0]).arguments(),
    )  # fmt: skip
    gk = caches[0] if opts.use_exp2 else caches[0] * LN2
    rstds = tuple(caches[10:12]) if opts.use_qk_l2norm_in_kernel else (_placeholder(), _placeholder())
    return (gk, *caches[1:10], *rstds, caches[12])


def _gate_input(x: Tensor) -> Tensor:
    """g and beta, bfloat16 or float32 (float16 becomes float32)."""
    return bf16(x) if x.dtype == ms.bfloat16 else f32(x)


def pre_process_fwd(opts, k, w, u, gk, cu):
    """``[N, Hv, K, V + K]`` float32."""
    symbol = _symbol("pre_process_fwd")
    _sizes(opts, k.shape[-1], u.shape[-1])
    packing = Packing.of(opts, cu, k.shape[0])
    rows = packing if packing.bounds is not None else Packing.rows(k.shape[0], k.shape[2])
    summaries = symbol(
        k=fold_rows(bf16(k)), w=fold_rows(bf16(w)), u=fold_rows(bf16(u)), gk=fold_rows(log2_decay(gk, opts.use_exp2)),
        cu_seqlens=rows.arguments()["cu_seqlens"], chunk_size=opts.chunk_size,
    )  # fmt: skip
    return packing.leave(summaries[0] if isinstance(summaries, (tuple, list)) else summaries, _no_token(packing, k.shape[1]))


def _no_token(packing: Packing, heads: int) -> Tensor | None:
    """Summaries ``[0 | I]`` of sequences without tokens, where there are any."""
    if len(packing.kept) == packing.count:
        return None
    eye = ops.concat((ops.zeros((WIDTH, WIDTH), F32), ops.eye(WIDTH, WIDTH, F32)), -1)
    return ops.broadcast_to(eye, (packing.count, heads, WIDTH, 2 * WIDTH))


def fwd_h(opts, k, w, u, gk, initial_state, cu):
    """``(h, v_new, final_state)``: h and v_new bfloat16, final_state float32."""
    symbol = _symbol("fwd_h")
    _sizes(opts, k.shape[-1], u.shape[-1])
    packing = Packing.of(opts, cu, k.shape[0])
    h0 = initial_state if opts.has_initial_state else None
    h, v_new, final_state = symbol(
        k=bf16(k), w=bf16(w), u=bf16(u), gk=log2_decay(gk, opts.use_exp2), chunk_size=opts.chunk_size, output_final_state=True,
        initial_state=None if h0 is None else _boundary(packing, h0, opts.state_v_first), use_exp2=True, state_v_first=False,
        **packing.arguments(),
    )  # fmt: skip
    h = transpose_state(chunks_first(h, chunk_axis(symbol, lambda: symbol(**_one_chunk("k w u"))[0])), opts.state_v_first)
    h0 = None if h0 is None else transpose_state(h0, opts.state_v_first)
    return h, v_new, transpose_state(packing.leave(final_state, h0), opts.state_v_first)


def _one_chunk(names: str) -> dict:
    """Arguments of a state kernel for one token and two heads."""
    row = ops.zeros((1, 2, 1, WIDTH), ms.bfloat16)
    return {name: row for name in names.split()} | {"gk": ops.zeros((1, 2, 1, WIDTH), F32), "chunk_size": CHUNK}


def fwd_finalize(opts, qg_scaled, aqk, v_new, h, cu):
    """Attention output in ``opts.layout``, bfloat16."""
    symbol = _symbol("fwd_finalize")
    _sizes(opts, qg_scaled.shape[-1], v_new.shape[-1])
    out = symbol(
        qg_scaled=bf16(qg_scaled), aqk=bf16(aqk), v_new=bf16(v_new), h=_kernel_h(opts, h), output_layout=four_axes(opts.layout),
        state_v_first=False, **Packing.of(opts, cu, aqk.shape[0]).arguments(),
    )  # fmt: skip
    return without_batch(out, opts.layout)


def _kernel_h(opts, h: Tensor) -> Tensor:
    """h as the kernels that read it take it: in the axis order in which fwd_h gives it."""
    h = bf16(transpose_state(h, opts.state_v_first))
    symbol = find("fwd_h")
    if isinstance(symbol, str):
        return h
    return chunks_first(h, chunk_axis(symbol, lambda: symbol(**_one_chunk("k w u"))[0]))


# ---- backward


def bwd_prepare(opts, aqk, v_new, d_o, h, cu):
    """``(dAqk float32, dv_local bfloat16, dq_raw float32)``."""
    symbol = _symbol("bwd_prepare")
    _sizes(opts, h.shape[-1], v_new.shape[-1])
    return symbol(
        aqk=bf16(aqk), v_new=bf16(v_new), d_o=bf16(with_batch(d_o, opts.layout)), h=_kernel_h(opts, h), scale=opts.scale,
        layout=four_axes(opts.layout), chunk_size=opts.chunk_size, state_v_first=False,
        **Packing.of(opts, cu, aqk.shape[0]).arguments(),
    )  # fmt: skip


def pre_process_bwd(opts, q, k, w, d_o, dv, gk, cu):
    """``[N, Hv, K, V + K]`` float32; the kernel takes one sequence a launch and gk in bfloat16 (up to 0.07 % of the state a chunk)."""
    symbol = _symbol("pre_process_bwd")
    _sizes(opts, k.shape[-1], dv.shape[-1])
    packing = Packing.of(opts, cu, k.shape[0])
    bounds = packing.bounds or Packing.rows(k.shape[0], k.shape[2]).bounds
    tensors = {"q": q, "k": k, "w": w, "d_o": d_o, "dv": dv, "gk": log2_decay(gk, opts.use_exp2)}
    tensors = {name: fold_rows(bf16(x)) for name, x in tensors.items()}
    summaries = []
    for begin, end in zip(bounds[:-1], bounds[1:], strict=True):
        one = {name: x[:, :, begin:end].contiguous() for name, x in tensors.items()}
        summary = symbol(**one, scale=opts.scale, chunk_size=opts.chunk_size, cu_seqlens=[0, end - begin])
        summaries.append(summary.reshape((1, *summary.shape[-3:])))
    return packing.leave(ops.concat(tuple(summaries), 0), _no_token(packing, k.shape[1]))


def bwd_dhu(opts, q, k, w, d_o, dv, gk, dht, cu):
    """``(dh bfloat16, K-first; dh0 float32; dv_scan bfloat16)``; ``opts.has_initial_state`` says whether dht is given."""
    symbol = _symbol("bwd_dhu")
    _sizes(opts, k.shape[-1], dv.shape[-1])
    packing = Packing.of(opts, cu, k.shape[0])
    wanted = ops.zeros((len(packing.kept), k.shape[1], WIDTH, WIDTH), state_dtype())  # h0 only asks for dh0
    dh, dh0, dv_scan = symbol(
        q=bf16(q), k=bf16(k), w=bf16(w), d_o=bf16(d_o), dv=bf16(dv), scale=opts.scale, chunk_size=opts.chunk_size,
        gk=log2_decay(gk, opts.use_exp2), h0=wanted, dht=_boundary(packing, dht, opts.state_v_first) if opts.has_initial_state else None,
        use_exp2=True, state_v_first=False, **packing.arguments(),
    )  # fmt: skip
    dh = chunks_first(dh, chunk_axis(symbol, lambda: symbol(**_one_chunk("q k w d_o dv"), scale=1.0)[0]))
    through = transpose_state(dht, opts.state_v_first) if opts.has_initial_state else None
    return dh, transpose_state(packing.leave(dh0, through), opts.state_v_first), dv_scan


def bwd_finalize(opts, q, k, v, gk, raw_g, beta, a_log, dt_bias, akk, v_new, h, dh, dv_scan, d_aqk, dq_raw, q_rstd, k_rstd, cu):
    """``(dq, dk, dv bfloat16, dbeta, dg float32 in opts.layout, dA_log, ddt_bias float32)``.

    The kernel takes as many key as value heads: q and k are repeated here, their gradients summed. A missing a_log or dt_bias is zeros.
    """
    symbol = _symbol("bwd_finalize")
    _require(finalize_limit(opts.safe_gate, opts.use_gate_in_kernel) or dtype_limit("v", v.dtype))
    _sizes(opts, k.shape[-1], v.shape[-1])
    heads, key_heads = v.shape[1], k.shape[1]
    rstds = {"q_rstd": None, "k_rstd": None}
    if opts.use_qk_l2norm_in_kernel:
        rstds = {"q_rstd": f32(expand_heads(q_rstd, heads)), "k_rstd": f32(expand_heads(k_rstd, heads))}
    inside = symbol.takes("use_beta_sigmoid_in_kernel") or not opts.use_beta_sigmoid_in_kernel
    effective = beta if inside else sigmoid(f32(beta)) * opts.beta_factor
    flags = {"use_beta_sigmoid_in_kernel": opts.use_beta_sigmoid_in_kernel, "allow_neg_eigval": opts.allow_neg_eigval} if inside else {}
    dh_symbol = find("bwd_dhu")
    axis = 1
    if not isinstance(dh_symbol, str):
        axis = chunk_axis(dh_symbol, lambda: dh_symbol(**_one_chunk("q k w d_o dv"), scale=1.0)[0])
    dq, dk, dv, dbeta, dg, da_log, ddt_bias = symbol(
        q=bf16(expand_heads(q, heads)), k=bf16(expand_heads(k, heads)), v=bf16(v), gk=log2_decay(gk, opts.use_exp2), raw_g=f32(raw_g),
        beta=_gate_input(effective), a_log=f32(a_log) if opts.has_a_log else ops.zeros((heads,), F32),
        dt_bias=f32(dt_bias.reshape((-1,))) if opts.has_dt_bias else ops.zeros((heads * WIDTH,), F32), akk=bf16(akk), v_new=bf16(v_new),
        h=_kernel_h(opts, h), dh=chunks_first(bf16(dh), axis), dv_scan=bf16(dv_scan), d_aqk=f32(d_aqk), dq_raw=f32(dq_raw),
        scale=opts.scale, lower_bound=opts.lower_bound, chunk_size=opts.chunk_size, safe_gate=True, use_gate_in_kernel=True, use_exp2=True,
        state_v_first=False, output_layout="BNSD", **rstds, **flags, **Packing.of(opts, cu, v.shape[0]).arguments(),
    )  # fmt: skip
    dq, dk = reduce_heads(f32(dq), key_heads), reduce_heads(f32(dk), key_heads)
    if not inside:
        dbeta = f32(dbeta) * effective * sigmoid(-f32(beta))
    da_log = da_log if opts.has_a_log else a_log - a_log
    ddt_bias = ddt_bias.reshape(dt_bias.shape) if opts.has_dt_bias else dt_bias - dt_bias
    return (*(_in_layout(opts.layout, x) for x in (dq, dk, dv, dbeta, dg)), da_log, ddt_bias)


def _in_layout(layout: str, x: Tensor) -> Tensor:
    """Head-major ``[B, H, T, ...]`` in ``layout``."""
    return without_batch(ops.swapaxes(x, 1, 2) if layout in ("BSND", "TND") else x, layout)


# ---- merge


def merge_fwd_bwd(opts, summaries, ranks):
    """Boundary state from the summaries of ``ranks`` (in the order they are applied), from zero.

    The kernel takes ``[S, H, K, V + K]`` and at least one rank; it never reads the state that it is given. Nothing to merge is zeros, and
    no launch.
    """
    width = summaries.shape[-1] - summaries.shape[-2]
    _sizes(opts, summaries.shape[-2], width)
    shape = (*summaries.shape[1:-1], width)
    if not ranks:
        return transpose_state(ops.zeros(shape, F32), opts.state_v_first)
    symbol = _symbol("merge_fwd_bwd")
    forward = ranks[0] < ranks[-1] or (len(ranks) == 1 and ranks[0] + 1 < summaries.shape[0])
    heads = 1
    for size in shape[:-2]:
        heads *= size
    state = symbol(
        state=ops.zeros((heads, *shape[-2:]), F32), summaries=f32(summaries).reshape((summaries.shape[0], heads, *summaries.shape[-2:])),
        pre_or_post_num_ranks=len(ranks), rank=ranks[-1] + 1 if forward else ranks[-1] - 1, forward=forward, state_v_first=False,
    )  # fmt: skip
    return transpose_state(state.reshape(shape), opts.state_v_first)
