"""KDA's stages on chunks, in MindSpore ops: what the composite backend computes (design section 2).

Shapes: B batch, H = Hv value heads, G = Hk key heads, T tokens, N chunks, C tokens a chunk, K key width, V value width, S sequences;
everything float32 and head-major. ``plan`` and ``index`` (``kcp.ops.sequences``) turn tokens ``[B, H, T, *]`` into chunks
``[B, H, N, C, *]``.
"""

import mindspore as ms
from mindspore import Tensor, ops

from kcp.ops import numerics
from kcp.ops.backends.chunk_math import batch_constant, decays, inverse_unit_lower, pair_grads, pair_scores
from kcp.ops.gates import l2_normalise, l2_normalise_grad, log_decay, log_decay_grad
from kcp.ops.layouts import expand_heads, reduce_heads
from kcp.ops.numerics import LN2, matmul


def _column(x: Tensor) -> Tensor:
    return ops.expand_dims(x, -1)


def prepare(opts, plan, index, q, k, v, g, beta, a_log, dt_bias):
    """Norms, gate, decays, Aqk, (I + L)^-1, w, u of every chunk.

    Args:
        q, k: ``[B, G, T, K]``; v ``[B, H, T, V]``; g ``[B, H, T, K]``; beta ``[B, H, T]``, float32, head-major.

    Returns:
        ``(gk, aqk, akk, w, u, qg, kg)`` in chunks and ``(q_hat, k_hat, q_rstd, k_rstd, beta_eff)`` by token.
    """
    q_rstd = k_rstd = None
    if opts.use_qk_l2norm_in_kernel:
        q, q_rstd = l2_normalise(q, opts.epsilon)
        k, k_rstd = l2_normalise(k, opts.epsilon)
    if opts.use_beta_sigmoid_in_kernel:
        beta = numerics.sigmoid(beta) * opts.beta_factor
    a = log_decay(g, a_log, dt_bias, opts.use_gate_in_kernel, opts.safe_gate, opts.lower_bound)
    a, v, b = plan.split(a, index), plan.split(v, index), _column(plan.split(beta, index))
    qn = expand_heads(plan.split(q, index), v.shape[1])
    kn = expand_heads(plan.split(k, index), v.shape[1])
    gk, from_start, to_end, in_block, to_blocks = decays(a)
    scores_q, scores_k = pair_scores(qn, kn, a, in_block, to_blocks)
    aqk = scores_q * opts.scale
    akk = inverse_unit_lower(scores_k * b)
    w = matmul(akk, kn * from_start * b)
    u = matmul(akk, v * b)
    gk = gk if opts.use_exp2 else gk * LN2
    return (gk, aqk, akk, w, u, qn * from_start, kn * to_end), (q, k, q_rstd, k_rstd, beta)


def last_decay(opts, gk: Tensor) -> Tensor:
    """2^G_last of every chunk ``[B, H, N, K, 1]`` from gk ``[B, H, N, C, K]`` (natural log without ``opts.use_exp2``)."""
    last = gk[..., -1, :]
    return _column(numerics.exp2(last if opts.use_exp2 else last / LN2))


def forward_scan(plan, index, k, w, u, decay, boundary):
    """v_new = u - w h ;  h' = 2^G_last h + kg^T v_new, chunk after chunk.

    Args:
        k: kg ``[B, H, N, C, K]``; w ``[B, H, N, C, K]``; u ``[B, H, N, C, V]``; decay ``[B, H, N, K, 1]``.
        boundary: initial states ``[S, H, K, V]``, one a sequence.

    Returns:
        ``(h [B, H, N, K, V] at every chunk's start, v_new [B, H, N, C, V], final states [S, H, K, V])``.
    """
    state, starts, values, ends = None, [], [], []
    for c in range(plan.num_chunks):
        state = plan.enter(state, boundary, c, index)
        v_new = u[:, :, c] - matmul(w[:, :, c], state)
        starts.append(state)
        values.append(v_new)
        state = decay[:, :, c] * state + matmul(k[:, :, c], v_new, transpose_a=True)
        ends.append(state)
    return ops.stack(tuple(starts), 2), ops.stack(tuple(values), 2), plan.leave(ends, boundary, index)


def output(qg_scaled, aqk, v_new, h):
    """o = scale qg h + Aqk v_new ``[B, H, N, C, V]``."""
    return matmul(qg_scaled, h) + matmul(aqk, v_new)


def backward_local(opts, aqk, v_new, d_o, h):
    """``(dAqk, dv_local, dq_raw)`` = (scale tril(do v_new^T), Aqk^T do, do h^T), in chunks."""
    d_aqk = matmul(d_o, v_new, transpose_b=True) * opts.scale * batch_constant("lower", aqk.shape[-1], aqk)
    return d_aqk, matmul(aqk, d_o, transpose_a=True), matmul(d_o, h, transpose_b=True)


def backward_scan(plan, index, q_scaled, k, w, d_o, dv, decay, boundary):
    """dv_new = dv_local + kg dh ;  dh' = 2^G_last dh + scale qg^T do - w^T dv_new, from the last chunk to the first.

    Args:
        q_scaled: scale qg ``[B, H, N, C, K]``; k: kg; boundary: final-state gradients ``[S, H, K, V]``.

    Returns:
        ``(dh [B, H, N, K, V] at every chunk's end, initial-state gradients [S, H, K, V], dv_new [B, H, N, C, V])``.
    """
    grad, ends, starts, values = None, [], [], []
    for i in range(plan.num_chunks):
        c = plan.num_chunks - 1 - i
        grad = plan.enter_backward(grad, boundary, c, index)
        dv_new = dv[:, :, c] + matmul(k[:, :, c], grad)
        ends.append(grad)
        values.append(dv_new)
        outward = matmul(q_scaled[:, :, c], d_o[:, :, c], transpose_a=True)
        grad = decay[:, :, c] * grad + outward - matmul(w[:, :, c], dv_new, transpose_a=True)
        starts.append(grad)
    dh0 = plan.leave_backward(starts[::-1], boundary, index)
    return ops.stack(tuple(ends[::-1]), 2), dh0, ops.stack(tuple(values[::-1]), 2)


def backward_inputs(opts, plan, index, q, k, v, g, beta, a_log, dt_bias, akk, v_new, h, dh, dv_new, d_aqk, dq_raw, rstds):
    """Every gradient of a chunk, once its state gradient is known (design section 2, backward of a chunk).

    Args:
        q, k: normalised ``[B, G, T, K]``; v, g, by token, head-major; beta as given to the op (raw with the in-kernel sigmoid).
        akk, v_new, h, dh, dv_new, d_aqk, dq_raw: in chunks.
        rstds: ``(q_rstd, k_rstd)`` of the in-kernel norm, or ``(None, None)``.

    Returns:
        ``(dq, dk [B, G, T, K], dv [B, H, T, V], dbeta [B, H, T], dg [B, H, T, K], da_log [H] or None, ddt_bias [H, K] or None)``.
    """
    num_heads, num_v_heads, chunk_size = q.shape[1], v.shape[1], akk.shape[-1]
    sigmoid = numerics.sigmoid(beta) if opts.use_beta_sigmoid_in_kernel else None
    beta_eff = beta if sigmoid is None else sigmoid * opts.beta_factor
    a = plan.split(log_decay(g, a_log, dt_bias, opts.use_gate_in_kernel, opts.safe_gate, opts.lower_bound), index)
    vc, b = plan.split(v, index), _column(plan.split(beta_eff, index))
    qn = expand_heads(plan.split(q, index), num_v_heads)
    kn = expand_heads(plan.split(k, index), num_v_heads)
    _, from_start, to_end, in_block, to_blocks = decays(a)

    y = matmul(akk, dv_new, transpose_a=True)
    d_l = -matmul(y, v_new, transpose_b=True) * batch_constant("strict", chunk_size, akk)
    x, row, col = pair_grads(d_aqk * batch_constant("strict", chunk_size, akk), d_l, qn, kn, a, in_block, to_blocks, b)
    x = x + from_start * dq_raw * opts.scale
    row = row - from_start * matmul(y, h, transpose_b=True)  # dk as a row, without its factor beta
    d_kg = matmul(v_new, dh, transpose_b=True)
    d_beta = (y * vc).sum(-1) + (kn * row).sum(-1)

    # a_t scales all that crosses token t: pairs around it (reverse sum), the state's own decay and earlier kg (forward sum)
    through_state = (h * dh).sum(-1) * from_start[..., -1, :]
    earlier = matmul(batch_constant("strict", chunk_size, akk), kn * to_end * d_kg)
    pairs = qn * x + kn * (row * b - col)
    da = matmul(batch_constant("lower", chunk_size, akk), pairs, transpose_a=True) + earlier + ops.expand_dims(through_state, -2)

    self_pair = _column((d_aqk * batch_constant("eye", chunk_size, akk)).sum(-1))
    dq = reduce_heads(plan.merge(x + self_pair * kn, index), num_heads)
    dk = reduce_heads(plan.merge(row * b + col + to_end * d_kg + self_pair * qn, index), num_heads)
    if rstds[0] is not None:
        dq, dk = l2_normalise_grad(dq, q, rstds[0]), l2_normalise_grad(dk, k, rstds[1])
    d_beta = plan.merge(d_beta, index)
    if sigmoid is not None:
        d_beta = d_beta * beta_eff * numerics.sigmoid(-beta)  # 1 - sigmoid, without its cancellation
    dg, da_log, ddt_bias = log_decay_grad(
        plan.merge(da, index), g, a_log, dt_bias, opts.use_gate_in_kernel, opts.safe_gate, opts.lower_bound
    )
    return dq, dk, plan.merge(y * b, index), d_beta, dg, da_log, ddt_bias


def zero_and_identity(num: int, like_w: Tensor, like_u: Tensor) -> Tensor:
    """``[num, H, K, V + K]``, the summary ``[0 | I]`` of no token."""
    k = like_w.shape[-1]
    shape = (num, like_w.shape[1], k)
    eye = ops.broadcast_to(ops.eye(k, k, ms.float32), shape + (k,))
    return ops.concat((ops.zeros(shape + (like_u.shape[-1],), ms.float32), eye), -1)


def forward_summary(plan, index, num, k, w, u, decay):
    """``[num, H, K, V + K]`` = ``[E | M]``: the scan of ``[0 | I]`` with writes u for the first V columns only."""
    wide = ops.concat((u, ops.zeros(w.shape, ms.float32)), -1)
    return forward_scan(plan, index, k, w, wide, decay, zero_and_identity(num, w, u))[2]


def backward_summary(plan, index, num, q_scaled, k, w, d_o, dv, decay):
    """``[num, H, K, V + K]`` = ``[dE | dM]``: the backward scan of ``[0 | I]``."""
    none = ops.zeros(w.shape, ms.float32)
    wide_do, wide_dv = ops.concat((d_o, none), -1), ops.concat((dv, none), -1)
    return backward_scan(plan, index, q_scaled, k, w, wide_do, wide_dv, decay, zero_and_identity(num, w, dv))[1]


def forward_open(opts, plan, index, q, k, v, g, beta, a_log, dt_bias):
    """The state-independent half of the forward: ``(decay, aqk, akk, w, u, qg_scaled, kg)`` and, with the in-kernel norm, the norms."""
    (gk, aqk, akk, w, u, qg, kg), (q_hat, k_hat, q_rstd, k_rstd, _) = prepare(opts, plan, index, q, k, v, g, beta, a_log, dt_bias)
    caches = (last_decay(opts, gk), aqk, akk, w, u, qg * opts.scale, kg)
    return caches + ((q_hat, k_hat, q_rstd, k_rstd) if opts.use_qk_l2norm_in_kernel else ())


def forward_close(plan, index, caches, h0):
    """The rest, once the initial states are known: ``(out [B, H, T, V], final states [S, H, K, V], saved)``.

    ``saved`` feeds :func:`backward_open`; it holds nothing that the inputs do not give back.
    """
    decay, aqk, akk, w, u, qg_scaled, kg = caches[:7]
    h, v_new, final_state = forward_scan(plan, index, kg, w, u, decay, h0)
    out = plan.merge(output(qg_scaled, aqk, v_new, h), index)
    return out, final_state, (decay, aqk, akk, w, qg_scaled, kg, h, v_new) + caches[7:]


def backward_open(opts, plan, index, saved, d_o):
    """The half of the backward that needs no state gradient: ``(d_o, dAqk, dv_local, dq_raw)`` in chunks, from d_o ``[B, H, T, V]``."""
    d_o = plan.split(d_o, index)
    return (d_o,) + backward_local(opts, saved[1], saved[7], d_o, saved[6])


def backward_close(opts, plan, index, q, k, v, g, beta, a_log, dt_bias, saved, opened, d_final):
    """The rest, once the final states' gradients are known: the seven gradients and dh0 ``[S, H, K, V]``."""
    decay, _, akk, w, qg_scaled, kg, h, v_new = saved[:8]
    d_o, d_aqk, dv_local, dq_raw = opened
    rstds = (None, None)
    if opts.use_qk_l2norm_in_kernel:
        q, k, rstds = saved[8], saved[9], (saved[10], saved[11])
    dh, dh0, dv_new = backward_scan(plan, index, qg_scaled, kg, w, d_o, dv_local, decay, d_final)
    grads = backward_inputs(opts, plan, index, q, k, v, g, beta, a_log, dt_bias, akk, v_new, h, dh, dv_new, d_aqk, dq_raw, rstds)
    return grads, dh0
