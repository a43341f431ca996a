"""The composite backend: the op and its nine stages as MindSpore ops, for any device and both execution modes.

Converts the public layouts and dtypes (see ``docs/ops.md``) to head-major float32, calls ``chunk_stages``, and converts back.
"""

from functools import lru_cache

import mindspore as ms
from mindspore import ops
from mindspore.ops import constexpr

from kcp.ops.backends import chunk_stages as chunks
from kcp.ops.layouts import from_head_major, to_head_major, token_major, transpose_state
from kcp.ops.numerics import LN2, in_graph, matmul
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


def _float32(x):
    return ops.cast(x, ms.float32)


def _num_sequences(opts, batch, cu):
    if opts.cu_seqlens is None:
        return batch
    return cu.shape[0] - 1 if opts.cu_seqlens == "tensor" else len(opts.cu_seqlens) - 1


def _head_major(opts, *tensors):
    out = ()
    for x in tensors:
        out = out + (to_head_major(_float32(x), opts.layout),)
    return out


def _gate_parameters(opts, a_log, dt_bias):
    return (a_log if opts.has_a_log else None), (dt_bias if opts.has_dt_bias else None)


def op_forward(opts, q, k, v, g, beta, a_log, dt_bias, initial_state, cu):
    """Forward of ``chunk_kda``; absent optional inputs are placeholders (``opts.has_*``).

    Returns:
        ``(out, final_state, saved)``: out token-major in v's dtype, final_state float32, saved a tuple of caches for
        :func:`op_backward` (empty when the backward is to recompute them).
    """
    out, final_state, saved, _ = _forward(opts, q, k, v, g, beta, a_log, dt_bias, initial_state, cu)
    out = ops.cast(from_head_major(out, token_major(opts.layout)), v.dtype)
    return out, transpose_state(final_state, opts.state_v_first), saved if opts.disable_recompute else ()


def _forward(opts, q, k, v, g, beta, a_log, dt_bias, initial_state, cu):
    q, k, v, g, beta = _head_major(opts, q, k, v, g, beta)
    a_log, dt_bias = _gate_parameters(opts, a_log, dt_bias)
    plan = _plan(opts.cu_seqlens, cu, q.shape[2], opts.chunk_size)
    index = plan.index(cu)
    if opts.has_initial_state:
        h0 = transpose_state(initial_state, opts.state_v_first)
    else:
        h0 = ops.zeros((_num_sequences(opts, q.shape[0], cu), v.shape[1], q.shape[3], v.shape[3]), ms.float32)
    out, final_state, saved = chunks.forward(opts, plan, index, q, k, v, g, beta, a_log, dt_bias, h0)
    return out, final_state, saved, (plan, index, q, k, v, g, beta, a_log, dt_bias)


def op_backward(opts, q, k, v, g, beta, a_log, dt_bias, initial_state, cu, saved, d_out, d_final):
    """Backward of ``chunk_kda``; ``d_out`` or ``d_final`` may be None (no gradient arrives).

    Returns:
        ``(dq, dk, dv, dg, dbeta, da_log, ddt_bias, dh0)`` in the layout, shape and dtype of the inputs; zeros for placeholders.
    """
    inputs = (q, k, v, g, beta, a_log, dt_bias, initial_state)
    if not opts.disable_recompute:
        saved = _forward(opts, q, k, v, g, beta, a_log, dt_bias, initial_state, cu)[2]
    hq, hk, hv, hg, hb = _head_major(opts, q, k, v, g, beta)
    used_a_log, used_dt_bias = _gate_parameters(opts, a_log, dt_bias)
    plan = _plan(opts.cu_seqlens, cu, hq.shape[2], opts.chunk_size)
    index = plan.index(cu)
    if d_out is None:
        d_o = ops.zeros(hv.shape, ms.float32)
    else:
        d_o = to_head_major(_float32(d_out), token_major(opts.layout))
    states = (_num_sequences(opts, hq.shape[0], cu), hv.shape[1], hq.shape[3], hv.shape[3])
    d_state = ops.zeros(states, ms.float32) if d_final is None else transpose_state(d_final, opts.state_v_first)
    grads, dh0 = chunks.backward(
        opts, plan, index, hq, hk, hv, hg, hb, used_a_log, used_dt_bias, saved, d_o, d_state
    )
    dq, dk, dv, dbeta, dg, da_log, ddt_bias = grads
    token_grads = (dq, dk, dv, dg, dbeta)
    out = ()
    for i in range(5):
        out = out + (ops.cast(from_head_major(token_grads[i], opts.layout), inputs[i].dtype),)
    out = out + (da_log if opts.has_a_log else ops.zeros_like(a_log),)
    out = out + (ddt_bias.reshape(dt_bias.shape) if opts.has_dt_bias else ops.zeros_like(dt_bias),)
    dh0 = transpose_state(dh0, opts.state_v_first) if opts.has_initial_state else ops.zeros_like(initial_state)
    return out + (dh0,)
