"""The composite backend: the op and its nine stages as MindSpore ops, for any device and both execution modes.

Converts the public layouts and dtypes (see ``docs/ops.md``) to head-major float32, calls ``chunk_stages``, and converts back.
"""

from functools import lru_cache

import mindspore as ms
from mindspore import ops
from mindspore.ops import constexpr

from kcp.ops.backends import chunk_stages as chunks
from kcp.ops.layouts import from_head_major, to_head_major, token_major, transpose_state
from kcp.ops.numerics import in_graph, matmul
from kcp.ops.sequences import DensePlan, HostPlan, TensorPlan


def unavailable(stage: str) -> str | None:
    """Why ``stage`` (or ``"chunk_kda"``) can't be served here; None: it can."""
    return None


@lru_cache(64)
def _host_plan(cu_seqlens, chunk_size):
    return HostPlan(cu_seqlens, chunk_size)


@constexpr
def _static_plan(cu_seqlens, num_tokens, num_sequences, chunk_size):
    if cu_seqlens is None:
        return DensePlan(num_tokens, chunk_size)
    if cu_seqlens == "tensor":
        return TensorPlan(num_sequences, num_tokens, chunk_size)
    return _host_plan(cu_seqlens, chunk_size)


def _plan(cu_option, cu, num_tokens, chunk_size):
    """Chunk plan of a call; in PyNative the values of a boundary Tensor are read, so that no chunk is wasted."""
    if cu_option != "tensor":
        return _static_plan(cu_option, num_tokens, 0, chunk_size)
    if in_graph():
        return _static_plan(cu_option, num_tokens, cu.shape[0] - 1, chunk_size)
    return _host_plan(tuple(cu.asnumpy().tolist()), chunk_size)


def stage_plan(opts, cu, num_tokens):
    """Chunk plan of a call and its run-time index: ``(plan, index)``."""
    plan = _plan(opts.cu_seqlens, cu, num_tokens, opts.chunk_size)
    return plan, plan.index(cu)


def _token_count(opts, x):
    """Tokens of ``x`` in ``opts.layout``."""
    layout = opts.layout
    if layout == "BNSD":
        return x.shape[2]
    return x.shape[0] if layout == "TND" else x.shape[1]


def _float32(x):
    return ops.cast(x, ms.float32)


def _num_sequences(opts, batch, cu):
    if opts.cu_seqlens is None:
        return batch
    return cu.shape[0] - 1 if opts.cu_seqlens == "tensor" else len(opts.cu_seqlens) - 1


def _head_major(opts, x):
    return to_head_major(_float32(x), opts.layout)


def _like_input(opts, grad, x):
    return ops.cast(from_head_major(grad, opts.layout), x.dtype)


def _gate_parameters(opts, a_log, dt_bias):
    return (a_log if opts.has_a_log else None), (dt_bias if opts.has_dt_bias else None)


def _tokens(opts, q, k, v, g, beta, a_log, dt_bias, cu):
    """Inputs as head-major float32 with absent gate parameters None, and the chunk plan: ``(plan, index, inputs)``."""
    q, k, v = _head_major(opts, q), _head_major(opts, k), _head_major(opts, v)
    a_log, dt_bias = _gate_parameters(opts, a_log, dt_bias)
    plan, index = stage_plan(opts, cu, q.shape[2])
    return plan, index, (q, k, v, _head_major(opts, g), _head_major(opts, beta), a_log, dt_bias)


def _state_shape(opts, q, v, cu):
    """``(N, Hv, K, V)`` for head-major q and v."""
    return _num_sequences(opts, q.shape[0], cu), v.shape[1], q.shape[3], v.shape[3]


def op_forward(opts, q, k, v, g, beta, a_log, dt_bias, initial_state, cu):
    """Forward of ``chunk_kda``; absent optional inputs are placeholders (``opts.has_*``).

    Returns:
        ``(out, final_state, saved)``: out token-major in v's dtype, final_state float32, saved a tuple of caches for
        :func:`op_backward` (empty when the backward is to recompute them).
    """
    opened = forward_open(opts, q, k, v, g, beta, a_log, dt_bias, cu)
    return forward_close(opts, q, k, v, g, beta, a_log, dt_bias, initial_state, cu, opened)


def op_backward(opts, q, k, v, g, beta, a_log, dt_bias, initial_state, cu, saved, d_out, d_final):
    """Backward of ``chunk_kda``; ``d_out`` or ``d_final`` may be None (no gradient arrives).

    Returns:
        ``(dq, dk, dv, dg, dbeta, da_log, ddt_bias, dh0)`` in the layout, shape and dtype of the inputs; zeros for placeholders.
    """
    saved, opened = backward_open(opts, q, k, v, g, beta, a_log, dt_bias, initial_state, cu, saved, d_out)
    return backward_close(opts, q, k, v, g, beta, a_log, dt_bias, initial_state, cu, saved, opened, d_final)


# ---- the op opened at its state exchange, for context parallelism: open, exchange summaries, close


def forward_open(opts, q, k, v, g, beta, a_log, dt_bias, cu):
    """What the forward computes before it needs its initial states."""
    plan, index, (q, k, v, g, beta, a_log, dt_bias) = _tokens(opts, q, k, v, g, beta, a_log, dt_bias, cu)
    return chunks.forward_open(opts, plan, index, q, k, v, g, beta, a_log, dt_bias)


def forward_summary(opts, q, k, v, g, beta, a_log, dt_bias, cu, opened):
    """Summaries ``[N, Hv, K, V + K]`` = ``[E | M]`` of the local sequences."""
    plan, index = stage_plan(opts, cu, _token_count(opts, q))
    decay, _, _, w, u, _, kg = opened[:7]
    return chunks.forward_summary(plan, index, _num_sequences(opts, w.shape[0], cu), kg, w, u, decay)


def forward_end(opts, q, k, v, g, beta, a_log, dt_bias, initial_state, cu, opened):
    """Outgoing states ``[N, Hv, K, V]`` (K-first) of the local sequences for known incoming ones (K-first): E alone from zero."""
    plan, index = stage_plan(opts, cu, _token_count(opts, q))
    decay, _, _, w, u, _, kg = opened[:7]
    return chunks.forward_scan(plan, index, kg, w, u, decay, initial_state)[2]


def forward_close(opts, q, k, v, g, beta, a_log, dt_bias, initial_state, cu, opened):
    """The rest of the forward from its initial states; results as :func:`op_forward`."""
    plan, index = stage_plan(opts, cu, _token_count(opts, q))
    if opts.has_initial_state:
        h0 = transpose_state(initial_state, opts.state_v_first)
    else:
        h0 = ops.zeros(_state_shape(opts, _head_major(opts, q), _head_major(opts, v), cu), ms.float32)
    out, final_state, saved = chunks.forward_close(plan, index, opened, h0)
    out = ops.cast(from_head_major(out, token_major(opts.layout)), v.dtype)
    return out, transpose_state(final_state, opts.state_v_first), saved if opts.disable_recompute else ()


def backward_open(opts, q, k, v, g, beta, a_log, dt_bias, initial_state, cu, saved, d_out):
    """What the backward computes before it needs its final states' gradients: ``(saved, opened)``, saved rebuilt if it is empty."""
    plan, index, inputs = _tokens(opts, q, k, v, g, beta, a_log, dt_bias, cu)
    if not opts.disable_recompute:
        q, k, v, g, beta, a_log, dt_bias = inputs
        caches = chunks.forward_open(opts, plan, index, q, k, v, g, beta, a_log, dt_bias)
        if opts.has_initial_state:
            h0 = transpose_state(initial_state, opts.state_v_first)
        else:
            h0 = ops.zeros(_state_shape(opts, q, v, cu), ms.float32)
        saved = chunks.forward_close(plan, index, caches, h0)[2]
    if d_out is None:
        d_o = ops.zeros(inputs[2].shape, ms.float32)
    else:
        d_o = to_head_major(_float32(d_out), token_major(opts.layout))
    return saved, chunks.backward_open(opts, plan, index, saved, d_o)


def backward_summary(opts, q, cu, saved, opened):
    """Backward summaries ``[N, Hv, K, V + K]`` = ``[dE | dM]`` of the local sequences."""
    plan, index = stage_plan(opts, cu, _token_count(opts, q))
    decay, _, _, w, qg_scaled, kg = saved[:6]
    return chunks.backward_summary(plan, index, _num_sequences(opts, w.shape[0], cu), qg_scaled, kg, w, opened[0], opened[2], decay)


def backward_end(opts, q, cu, saved, opened, d_final):
    """Gradients ``[N, Hv, K, V]`` (K-first) that leave towards earlier tokens for known final-state gradients: dE alone from zero."""
    plan, index = stage_plan(opts, cu, _token_count(opts, q))
    decay, _, _, w, qg_scaled, kg = saved[:6]
    return chunks.backward_scan(plan, index, qg_scaled, kg, w, opened[0], opened[2], decay, d_final)[1]


def backward_close(opts, q, k, v, g, beta, a_log, dt_bias, initial_state, cu, saved, opened, d_final):
    """The rest of the backward from the final states' gradients; results as :func:`op_backward`."""
    plan, index, (hq, hk, hv, hg, hb, used_a_log, used_dt_bias) = _tokens(opts, q, k, v, g, beta, a_log, dt_bias, cu)
    if d_final is None:
        d_state = ops.zeros(_state_shape(opts, hq, hv, cu), ms.float32)
    else:
        d_state = transpose_state(d_final, opts.state_v_first)
    grads, dh0 = chunks.backward_close(opts, plan, index, hq, hk, hv, hg, hb, used_a_log, used_dt_bias, saved, opened, d_state)
    dq, dk, dv, dbeta, dg, da_log, ddt_bias = grads
    da_log = da_log if opts.has_a_log else a_log - a_log
    ddt_bias = ddt_bias.reshape(dt_bias.shape) if opts.has_dt_bias else dt_bias - dt_bias
    dh0 = transpose_state(dh0, opts.state_v_first) if opts.has_initial_state else initial_state - initial_state
    dq, dk, dv = _like_input(opts, dq, q), _like_input(opts, dk, k), _like_input(opts, dv, v)
    return dq, dk, dv, _like_input(opts, dg, g), _like_input(opts, dbeta, beta), da_log, ddt_bias, dh0


# ---- the nine stages: token-indexed head-major caches in and out (kcp/ops/stages.py documents every argument)


def _chunk_states(opts, h):
    """``[B, Nc, Hv, K, V]`` (or V-first) -> ``[B, Hv, Nc, K, V]``."""
    return ops.swapaxes(transpose_state(h, opts.state_v_first), 1, 2)


def fwd_prepare(opts, q, k, v, g, beta, a_log, dt_bias, cu):
    """The thirteen caches of ``chunk_kda_fwd_prepare``; without the in-kernel norm q_rstd and k_rstd are placeholders."""
    q, k, v = _head_major(opts, q), _head_major(opts, k), _head_major(opts, v)
    g, beta = _head_major(opts, g), _head_major(opts, beta)
    a_log, dt_bias = _gate_parameters(opts, a_log, dt_bias)
    plan, index = stage_plan(opts, cu, q.shape[2])
    (gk, aqk, akk, w, u, qg, kg), (q_hat, k_hat, q_rstd, k_rstd, beta) = chunks.prepare(opts, plan, index, q, k, v, g, beta, a_log, dt_bias)
    gk = plan.merge(gk, index)
    aqk, akk, w, u = plan.merge(aqk, index), plan.merge(akk, index), plan.merge(w, index), plan.merge(u, index)
    qg, kg = plan.merge(qg, index), plan.merge(kg, index)
    if not opts.use_qk_l2norm_in_kernel:  # a Cell must not hand its own inputs back, nor None (PyNative)
        q_hat, k_hat, q_rstd, k_rstd = q_hat * 1.0, k_hat * 1.0, ops.zeros((1,), ms.float32), ops.zeros((1,), ms.float32)
    if not opts.use_beta_sigmoid_in_kernel:
        beta = beta * 1.0
    return gk, aqk, akk, w, u, qg, kg, qg * opts.scale, q_hat, k_hat, q_rstd, k_rstd, beta


def pre_process_fwd(opts, k, w, u, gk, cu):
    """``[N, Hv, K, V + K]``, the affine summaries ``[E | M]`` of the local sequences."""
    plan, index = stage_plan(opts, cu, k.shape[2])
    decay = chunks.last_decay(opts, plan.split(gk, index, True))
    k, w, u = plan.split(k, index), plan.split(w, index), plan.split(u, index)
    return chunks.forward_summary(plan, index, _num_sequences(opts, k.shape[0], cu), k, w, u, decay)


def fwd_h(opts, k, w, u, gk, initial_state, cu):
    """``(h, v_new, final_state)`` of ``chunk_kda_fwd_h``."""
    plan, index = stage_plan(opts, cu, k.shape[2])
    decay = chunks.last_decay(opts, plan.split(gk, index, True))
    k, w, u = plan.split(k, index), plan.split(w, index), plan.split(u, index)
    if opts.has_initial_state:
        h0 = transpose_state(initial_state, opts.state_v_first)
    else:
        shape = (_num_sequences(opts, k.shape[0], cu), k.shape[1], k.shape[-1], u.shape[-1])
        h0 = ops.zeros(shape, ms.float32)
    h, v_new, final_state = chunks.forward_scan(plan, index, k, w, u, decay, h0)
    h = transpose_state(ops.swapaxes(h, 1, 2), opts.state_v_first)
    return h, plan.merge(v_new, index), transpose_state(final_state, opts.state_v_first)


def fwd_finalize(opts, qg_scaled, aqk, v_new, h, cu):
    """Attention output in ``opts.layout``, float32."""
    plan, index = stage_plan(opts, cu, aqk.shape[2])
    qg_scaled, aqk, v_new = plan.split(qg_scaled, index), plan.split(aqk, index), plan.split(v_new, index)
    out = chunks.output(qg_scaled, aqk, v_new, _chunk_states(opts, h))
    return from_head_major(plan.merge(out, index), opts.layout)


def bwd_prepare(opts, aqk, v_new, d_o, h, cu):
    """``(dAqk, dv_local, dq_raw)`` of ``chunk_kda_bwd_prepare``."""
    plan, index = stage_plan(opts, cu, aqk.shape[2])
    d_o = plan.split(_head_major(opts, d_o), index)
    d_aqk, dv, dq = chunks.backward_local(opts, plan.split(aqk, index), plan.split(v_new, index), d_o, _chunk_states(opts, h))
    return plan.merge(d_aqk, index), plan.merge(dv, index), plan.merge(dq, index)


def _backward_scan_inputs(opts, plan, index, q, k, w, d_o, dv, gk):
    decay = chunks.last_decay(opts, plan.split(gk, index, True))
    q, k, w = plan.split(q * opts.scale, index), plan.split(k, index), plan.split(w, index)
    return q, k, w, plan.split(_float32(d_o), index), plan.split(dv, index), decay


def pre_process_bwd(opts, q, k, w, d_o, dv, gk, cu):
    """``[N, Hv, K, V + K]``, the backward affine summaries ``[dE | dM]`` of the local sequences."""
    plan, index = stage_plan(opts, cu, k.shape[2])
    q, k, w, d_o, dv, decay = _backward_scan_inputs(opts, plan, index, q, k, w, d_o, dv, gk)
    return chunks.backward_summary(plan, index, _num_sequences(opts, k.shape[0], cu), q, k, w, d_o, dv, decay)


def bwd_dhu(opts, q, k, w, d_o, dv, gk, dht, cu):
    """``(dh, dh0, dv_scan)`` of ``chunk_kda_bwd_dhu``; ``opts.has_initial_state`` says whether dht is given."""
    plan, index = stage_plan(opts, cu, k.shape[2])
    q, k, w, d_o, dv, decay = _backward_scan_inputs(opts, plan, index, q, k, w, d_o, dv, gk)
    if opts.has_initial_state:
        boundary = transpose_state(dht, opts.state_v_first)
    else:
        shape = (_num_sequences(opts, k.shape[0], cu), k.shape[1], k.shape[-1], dv.shape[-1])
        boundary = ops.zeros(shape, ms.float32)
    dh, dh0, dv = chunks.backward_scan(plan, index, q, k, w, d_o, dv, decay, boundary)
    return ops.swapaxes(dh, 1, 2), transpose_state(dh0, opts.state_v_first), plan.merge(dv, index)


def bwd_finalize(opts, q, k, v, gk, raw_g, beta, a_log, dt_bias, akk, v_new, h, dh, dv_scan, d_aqk, dq_raw, q_rstd, k_rstd, cu):
    """``(dq, dk, dv, dbeta, dg, dA_log, ddt_bias)`` of ``chunk_kda_bwd_finalize``, token gradients in ``opts.layout``, float32.

    Decays are computed again from raw_g, more exactly than gk would give them.
    """
    used_a_log, used_dt_bias = _gate_parameters(opts, a_log, dt_bias)
    plan, index = stage_plan(opts, cu, k.shape[2])
    rstds = (q_rstd, k_rstd) if opts.use_qk_l2norm_in_kernel else (None, None)
    dq, dk, dv, dbeta, dg, da_log, ddt_bias = chunks.backward_inputs(
        opts, plan, index, _float32(q), _float32(k), _float32(v), _float32(raw_g), _float32(beta), used_a_log, used_dt_bias,
        plan.split(akk, index), plan.split(v_new, index), _chunk_states(opts, h), ops.swapaxes(dh, 1, 2),
        plan.split(dv_scan, index), plan.split(d_aqk, index), plan.split(dq_raw, index), rstds,
    )  # fmt: skip
    layout = opts.layout
    dq, dk, dv = from_head_major(dq, layout), from_head_major(dk, layout), from_head_major(dv, layout)
    da_log = da_log if opts.has_a_log else a_log - a_log
    ddt_bias = ddt_bias.reshape(dt_bias.shape) if opts.has_dt_bias else dt_bias - dt_bias
    return dq, dk, dv, from_head_major(dbeta, layout), from_head_major(dg, layout), da_log, ddt_bias


def merge_fwd_bwd(opts, summaries, ranks):
    """Boundary state from the summaries of ``ranks`` (in the order they are applied): ``out <- M out + E`` from zero."""
    width = summaries.shape[-1] - summaries.shape[-2]
    state = ops.zeros(summaries.shape[1:-1] + (width,), ms.float32)
    for r in ranks:
        state = matmul(summaries[r][..., width:], state) + summaries[r][..., :width]
    return transpose_state(state, opts.state_v_first)
