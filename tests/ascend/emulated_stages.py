"""The nine stages of the emulation (see ``emulator.py``), one function a symbol, with the document's signatures."""

from __future__ import annotations

import mindspore as ms
import numpy as np
from emulated_storage import (
    B16,
    CHUNK,
    EITHER,
    F32,
    LN2,
    WIDTH,
    bf16,
    calls,
    chunk_number,
    f32,
    need,
    need_attributes,
    need_tensor,
    read,
    sequences,
    stored,
)

# ---- forward stages


def npu_chunk_kda_fwd_prepare(
    q, k, v, g, beta, scale, chunk_size=64, *, layout="BNSD", a_log=None, dt_bias=None, cu_seqlens=None, chunk_indices=None,
    epsilon=1e-6, use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False,
    safe_gate=False, lower_bound=-5.0, use_exp2=True, backward_mode="save",
):  # fmt: skip
    calls.append("fwd_prepare")
    need_attributes(chunk_size)
    need(layout in ("BNSD", "BSND"), f"layout {layout} is not emulated")
    need(not safe_gate or use_gate_in_kernel, "safe_gate needs use_gate_in_kernel")
    need(not allow_neg_eigval or use_beta_sigmoid_in_kernel, "allow_neg_eigval needs use_beta_sigmoid_in_kernel")
    need(not safe_gate or -5.0 <= lower_bound < 0.0, f"lower_bound must be in [-5, 0), but got {lower_bound}")
    need(backward_mode in ("none", "forward", "recompute", "save"), f"backward_mode {backward_mode} is invalid")
    need(not use_gate_in_kernel or a_log is not None, "a_log is required when the gate is computed in the kernel")
    order = (0, 2, 1, 3) if layout == "BSND" else (0, 1, 2, 3)
    b, hk, t = (q.shape[i] for i in order[:3])
    hv = v.shape[order[1]]
    need(hv % hk == 0, f"HV % HK must be 0, but got {hv} and {hk}")

    def token(name, x, heads, dtypes, width=WIDTH):
        shape = (b, t, heads, width) if layout == "BSND" else (b, heads, t, width)
        need_tensor(name, x, dtypes, shape if width else shape[:3])
        x = read(x)
        return np.swapaxes(x, 1, 2) if layout == "BSND" else x

    q, k, v = token("q", q, hk, B16), token("k", k, hk, B16), token("v", v, hv, B16)
    g, beta = token("g", g, hv, EITHER), token("beta", beta, hv, EITHER, 0)
    rstds = [np.ones(x.shape[:3], np.float32) for x in (q, k)]
    if use_qk_l2norm_in_kernel:
        rstds = [1 / np.sqrt((x * x).sum(-1) + np.float32(epsilon)) for x in (q, k)]
        q, k = q * rstds[0][..., None], k * rstds[1][..., None]
    q_hat, k_hat = stored(q), stored(k)
    a = g
    if use_gate_in_kernel:
        need_tensor("a_log", a_log, F32, (hv,))
        x = g
        if dt_bias is not None:
            need_tensor("dt_bias", dt_bias, F32, (hv * WIDTH,))
            x = x + read(dt_bias).reshape(1, hv, 1, WIDTH)
        rate = np.exp(read(a_log)).reshape(1, hv, 1, 1)
        a = lower_bound / (1 + np.exp(-rate * x)) if safe_gate else -rate * np.logaddexp(0, x)
    if use_beta_sigmoid_in_kernel:
        beta = (2 if allow_neg_eigval else 1) / (1 + np.exp(-beta))
    beta = beta.astype(np.float32)

    def empty(width):
        return np.zeros((b, hv, t, width), np.float32)

    gk, aqk, akk, w, u, qg, kg = empty(WIDTH), empty(CHUNK), empty(CHUNK), empty(WIDTH), empty(WIDTH), empty(WIDTH), empty(WIDTH)
    qx, kx = (np.repeat(x, hv // hk, 1) for x in (q_hat, k_hat))
    for chunks in sequences(b, t, cu_seqlens, chunk_indices, strictly=False):
        for row, begin, end in chunks:
            at, n = (row, slice(None), slice(begin, end)), end - begin
            G = np.cumsum(a[at], 1, dtype=np.float64) / LN2
            gk[at] = G
            pairs = np.exp2(np.where(np.tri(n)[None, :, :, None] > 0, G[:, :, None] - G[:, None], -np.inf))
            scores_q = np.einsum("hik,hjk,hijk->hij", qx[at], kx[at], pairs) * scale
            scores_k = np.einsum("hik,hjk,hijk->hij", kx[at], kx[at], pairs) * np.tri(n, k=-1)
            aqk[at][..., :n] = stored(scores_q)
            akk[at][..., :n] = stored(np.linalg.inv(np.eye(n) + beta[at][..., None] * scores_k))
            from_start = kx[at] * np.exp2(G)
            w[at] = stored(akk[at][..., :n] @ stored(from_start * beta[at][..., None]))
            u[at] = stored(akk[at][..., :n] @ stored(v[at] * beta[at][..., None]))
            qg[at], kg[at] = stored(qx[at] * np.exp2(G)), stored(kx[at] * np.exp2(G[:, -1:] - G))
    slots = [f32(gk if use_exp2 else gk * LN2), *(bf16(x) for x in (aqk, akk, w, u, qg, kg, qg * np.float32(scale), q_hat, k_hat)),
             f32(rstds[0]), f32(rstds[1]), f32(beta)]  # fmt: skip
    kept = {"none": (0, 1, 3, 4, 6, 7), "forward": (0, 1, 2, 3, 4, 6, 7), "recompute": (0, 1, 3, 4, 6, 7, 8, 9, 10, 11, 12)}
    wanted = kept.get(backward_mode, range(13))
    return tuple(x if i in wanted else None for i, x in enumerate(slots))


def _caches(names, tensors, width=WIDTH):
    """bfloat16 caches ``[B, Hv, T, width]`` of one shape, read."""
    b, hv, t = tensors[0].shape[:3]
    for name, x in zip(names, tensors, strict=True):
        need_tensor(name, x, B16, (b, hv, t, width))
    return [read(x) for x in tensors]


def npu_chunk_kda_pre_process_fwd(k, w, u, *, gk, cu_seqlens, chunk_size=64):
    calls.append("pre_process_fwd")
    need_attributes(chunk_size)
    need(k.shape[0] == 1, f"pre_process_fwd needs B=1, but got {k.shape[0]}")
    need_tensor("gk", gk, F32, tuple(k.shape))
    (kn, wn, un), G = _caches("kwu", (k, w, u)), read(gk)
    out = []
    for chunks in sequences(1, k.shape[2], cu_seqlens, None):
        e = np.zeros((k.shape[1], WIDTH, WIDTH), np.float32)
        m = np.broadcast_to(np.eye(WIDTH, dtype=np.float32), e.shape)
        for row, begin, end in chunks:
            at = (row, slice(None), slice(begin, end))
            decay, kt = np.exp2(G[row, :, end - 1])[..., None], np.swapaxes(kn[at], 1, 2)
            e, m = decay * e + kt @ (un[at] - wn[at] @ e), decay * m - kt @ (wn[at] @ m)
        out.append(np.concatenate([e, m], -1))
    return (f32(np.stack(out)),)


def npu_chunk_kda_fwd_h(
    k, w, u, *, gk, initial_state=None, output_final_state=False, chunk_size=64, cu_seqlens=None, chunk_indices=None, use_exp2=True,
    state_v_first=False,
):  # fmt: skip
    calls.append("fwd_h")
    need_attributes(chunk_size, use_exp2)
    b, hv, t = k.shape[:3]
    need_tensor("gk", gk, F32, tuple(k.shape))
    (kn, wn, un), G = _caches("kwu", (k, w, u)), read(gk)
    all_chunks = sequences(b, t, cu_seqlens, chunk_indices)
    place = chunk_number(b, all_chunks)
    h = np.zeros((b, 1 + max(place.values()), hv, WIDTH, WIDTH), np.float32)
    v_new, ends = np.zeros(un.shape, np.float32), []
    if initial_state is not None:
        need_tensor("initial_state", initial_state, F32, (len(all_chunks), hv, WIDTH, WIDTH))
        starts = read(initial_state)
        starts = np.swapaxes(starts, -1, -2) if state_v_first else starts
    for n, chunks in enumerate(all_chunks):
        state = np.zeros((hv, WIDTH, WIDTH), np.float32) if initial_state is None else starts[n]
        for row, begin, end in chunks:
            at = (row, slice(None), slice(begin, end))
            h[row, place[row, begin]] = stored(state)
            v_new[at] = stored(un[at] - wn[at] @ stored(state))
            state = np.exp2(G[row, :, end - 1])[..., None] * state + np.swapaxes(kn[at], 1, 2) @ v_new[at]
        ends.append(state)
    ends = np.stack(ends)
    if state_v_first:
        h, ends = np.swapaxes(h, -1, -2), np.swapaxes(ends, -1, -2)
    return bf16(h), bf16(v_new), f32(ends) if output_final_state else None


def _need_h(h, b, hv, all_chunks, state_v_first):
    count = 1 + max(chunk_number(b, all_chunks).values())
    need_tensor("h", h, B16, (b, count, hv, WIDTH, WIDTH))
    return np.swapaxes(read(h), -1, -2) if state_v_first else read(h)


def npu_chunk_kda_fwd_finalize(qg_scaled, aqk, v_new, h, *, output_layout="BSND", state_v_first=False, cu_seqlens=None, chunk_indices=None):
    calls.append("fwd_finalize")
    need(output_layout in ("BSND", "BNSD"), f"output_layout {output_layout} needs inputs without a batch axis")
    (qs, vn), (scores,) = _caches(("qg_scaled", "v_new"), (qg_scaled, v_new)), _caches(("aqk",), (aqk,), CHUNK)
    b, hv, t = qs.shape[:3]
    all_chunks = sequences(b, t, cu_seqlens, chunk_indices)
    hn, place, out = _need_h(h, b, hv, all_chunks, state_v_first), chunk_number(b, all_chunks), np.zeros(vn.shape, np.float32)
    for chunks in all_chunks:
        for row, begin, end in chunks:
            at = (row, slice(None), slice(begin, end))
            out[at] = qs[at] @ hn[row, place[row, begin]] + scores[at][..., : end - begin] @ vn[at]
    return bf16(np.swapaxes(out, 1, 2) if output_layout == "BSND" else out)


# ---- backward stages


def npu_chunk_kda_bwd_prepare(
    aqk, v_new, d_o, h, *, scale, layout="BNSD", chunk_size=64, state_v_first=False, cu_seqlens=None, chunk_indices=None
):
    calls.append("bwd_prepare")
    need_attributes(chunk_size)
    (scores,), (vn,) = _caches(("aqk",), (aqk,), CHUNK), _caches(("v_new",), (v_new,))
    b, hv, t = vn.shape[:3]
    need_tensor("d_o", d_o, B16, (b, hv, t, WIDTH) if layout == "BNSD" else (b, t, hv, WIDTH))
    do = read(d_o) if layout == "BNSD" else np.swapaxes(read(d_o), 1, 2)
    all_chunks = sequences(b, t, cu_seqlens, chunk_indices)
    hn, place = _need_h(h, b, hv, all_chunks, state_v_first), chunk_number(b, all_chunks)
    d_aqk, dv, dq = np.zeros(scores.shape, np.float32), np.zeros(vn.shape, np.float32), np.zeros(vn.shape, np.float32)
    for chunks in all_chunks:
        for row, begin, end in chunks:
            at, n = (row, slice(None), slice(begin, end)), end - begin
            d_aqk[at][..., :n] = scale * (do[at] @ np.swapaxes(vn[at], 1, 2)) * np.tri(n)
            dv[at] = np.swapaxes(scores[at][..., :n], 1, 2) @ do[at]
            dq[at] = do[at] @ np.swapaxes(hn[row, place[row, begin]], 1, 2)
    return f32(d_aqk), bf16(dv), f32(dq)


def npu_chunk_kda_pre_process_bwd(q, k, w, d_o, dv, scale, chunk_size=64, *, gk, cu_seqlens=None):
    calls.append("pre_process_bwd")
    need_attributes(chunk_size)
    need(q.shape[0] == 1, f"one launch takes one segment: B must be 1, but got {q.shape[0]}")
    need(cu_seqlens is None or len(cu_seqlens) == 2, f"one launch takes one segment, but cu_seqlens is {cu_seqlens}")
    need_tensor("gk", gk, B16, tuple(q.shape))
    (qn, kn, wn, do, dvn), G = _caches(("q", "k", "w", "d_o", "dv"), (q, k, w, d_o, dv)), read(gk)
    de = np.zeros((k.shape[1], WIDTH, WIDTH), np.float32)
    dm = np.broadcast_to(np.eye(WIDTH, dtype=np.float32), de.shape)
    for row, begin, end in reversed(sequences(1, k.shape[2], cu_seqlens, None)[0]):
        at = (row, slice(None), slice(begin, end))
        decay, wt = np.exp2(G[row, :, end - 1])[..., None], np.swapaxes(wn[at], 1, 2)
        de = decay * de + scale * np.swapaxes(qn[at], 1, 2) @ do[at] - wt @ (dvn[at] + kn[at] @ de)
        dm = decay * dm - wt @ (kn[at] @ dm)
    return f32(np.concatenate([de, dm], -1))


def npu_chunk_kda_bwd_dhu(
    q, k, w, d_o, dv, scale, chunk_size=64, *, gk, h0=None, dht=None, cu_seqlens=None, chunk_indices=None, use_exp2=True,
    state_v_first=False,
):  # fmt: skip
    calls.append("bwd_dhu")
    need_attributes(chunk_size, use_exp2)
    b, hv, t = k.shape[:3]
    need_tensor("gk", gk, F32, tuple(k.shape))
    (qn, kn, wn, do, dvn), G = _caches(("q", "k", "w", "d_o", "dv"), (q, k, w, d_o, dv)), read(gk)
    all_chunks = sequences(b, t, cu_seqlens, chunk_indices)
    place = chunk_number(b, all_chunks)
    for name, x in (("h0", h0), ("dht", dht)):
        if x is not None:
            need_tensor(name, x, F32, (len(all_chunks), hv, WIDTH, WIDTH))
    dh, scan, starts = np.zeros((b, 1 + max(place.values()), hv, WIDTH, WIDTH), np.float32), np.zeros(dvn.shape, np.float32), []
    for n, chunks in enumerate(all_chunks):
        grad = np.zeros((hv, WIDTH, WIDTH), np.float32)
        if dht is not None:
            grad = np.swapaxes(read(dht)[n], -1, -2) if state_v_first else read(dht)[n]
        for row, begin, end in reversed(chunks):
            at = (row, slice(None), slice(begin, end))
            dh[row, place[row, begin]] = stored(grad)
            scan[at] = stored(dvn[at] + kn[at] @ stored(grad))
            outward = scale * np.swapaxes(qn[at], 1, 2) @ do[at] - np.swapaxes(wn[at], 1, 2) @ scan[at]
            grad = np.exp2(G[row, :, end - 1])[..., None] * grad + outward
        starts.append(np.swapaxes(grad, -1, -2) if state_v_first else grad)
    return bf16(dh), None if h0 is None else f32(np.stack(starts)), bf16(scan)


def npu_chunk_kda_bwd_finalize(
    q, k, v, gk, raw_g, beta, a_log, dt_bias, akk, v_new, h, dh, dv_scan, d_aqk, dq_raw, *, scale, lower_bound=-5.0, chunk_size=64,
    safe_gate=True, use_gate_in_kernel=True, use_exp2=True, state_v_first=False, q_rstd=None, k_rstd=None, cu_seqlens=None,
    chunk_indices=None, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, output_layout="BNSD",
):  # fmt: skip
    calls.append("bwd_finalize")
    need_attributes(chunk_size, use_exp2)
    need(safe_gate and use_gate_in_kernel, "bwd_finalize needs safe_gate and use_gate_in_kernel")
    need((cu_seqlens is None) == (chunk_indices is None), "cu_seqlens and chunk_indices must appear together")
    need((q_rstd is None) == (k_rstd is None), "q_rstd and k_rstd must appear together")
    need(output_layout == "BNSD", f"output_layout {output_layout} is not emulated")
    qn, kn, vn, vnew, scan = _caches(("q", "k", "v", "v_new", "dv_scan"), (q, k, v, v_new, dv_scan))
    (inverse,) = _caches(("akk",), (akk,), CHUNK)
    b, hv, t = vn.shape[:3]
    for name, x, shape in (("gk", gk, (b, hv, t, WIDTH)), ("raw_g", raw_g, (b, hv, t, WIDTH)), ("a_log", a_log, (hv,)),
                           ("dt_bias", dt_bias, (hv * WIDTH,)), ("d_aqk", d_aqk, (b, hv, t, CHUNK)),
                           ("dq_raw", dq_raw, (b, hv, t, WIDTH))):  # fmt: skip
        need_tensor(name, x, F32, shape)
    need_tensor("beta", beta, EITHER, (b, hv, t))
    all_chunks = sequences(b, t, cu_seqlens, chunk_indices)
    hn, dhn = _need_h(h, b, hv, all_chunks, state_v_first), _need_h(dh, b, hv, all_chunks, False)
    caches = (inverse, vnew, hn, dhn, scan, read(d_aqk), read(dq_raw), read(gk).astype(np.float64))
    rstds = None
    if q_rstd is not None:
        for name, rstd in (("q_rstd", q_rstd), ("k_rstd", k_rstd)):
            need_tensor(name, rstd, F32, (b, hv, t))
        rstds = (read(q_rstd), read(k_rstd))
    gains = (use_beta_sigmoid_in_kernel, 2.0 if allow_neg_eigval else 1.0)
    grads = gradients(qn, kn, vn, read(raw_g), read(beta), read(a_log), read(dt_bias), caches, all_chunks, scale, rstds, gains, lower_bound)
    dq, dk, dv, db, dg, da_log, ddt_bias = grads
    return bf16(dq), bf16(dk), bf16(dv), bf16(db) if beta.dtype == ms.bfloat16 else f32(db), f32(dg), f32(da_log), f32(ddt_bias)


def gradients(q, k, v, raw_g, raw_beta, a_log, dt_bias, caches, all_chunks, scale, rstds, gains, lower_bound):
    """The seven gradients of all chunks; as many key as value heads. ``lower_bound`` None is the softplus gate."""
    inverse, v_new, h, dh, scan, d_aqk, dq_raw, gk = caches
    hv, place = v.shape[1], chunk_number(v.shape[0], all_chunks)
    sig = 1 / (1 + np.exp(-raw_beta))
    beta = gains[1] * sig if gains[0] else raw_beta
    dq, dk, dv, db, da = (np.zeros(x.shape, np.float32) for x in (q, k, v, raw_beta, k))
    for chunks in all_chunks:
        for row, begin, end in chunks:
            at, n = (row, slice(None), slice(begin, end)), end - begin
            G, hc, dhc = gk[at], h[row, place[row, begin]], dh[row, place[row, begin]]
            kc, qc, b = k[at], q[at], beta[at][..., None]
            pairs = np.exp2(np.where(np.tri(n)[None, :, :, None] > 0, G[:, :, None] - G[:, None], -np.inf))
            y = np.swapaxes(inverse[at][..., :n], 1, 2) @ scan[at]
            dl = -(y @ np.swapaxes(v_new[at], 1, 2)) * np.tri(n, k=-1)
            d_score = d_aqk[at][..., :n]
            start, to_end = np.exp2(G), np.exp2(G[:, -1:] - G)
            dqc = scale * start * dq_raw[at] + np.einsum("hij,hijk,hjk->hik", d_score, pairs, kc)
            row_k = -b * start * (y @ np.swapaxes(hc, 1, 2)) + b * np.einsum("hij,hijk,hjk->hik", dl, pairs, kc)
            dkg = v_new[at] @ np.swapaxes(dhc, 1, 2)
            column_k = to_end * dkg + np.einsum("hij,hijk,hik->hjk", d_score, pairs, qc)
            column_k = column_k + np.einsum("hij,hijk,hik->hjk", dl, pairs, kc * b)
            scores = np.einsum("hik,hjk,hijk->hij", kc, kc, pairs) * np.tri(n, k=-1)
            db[at] = (y * (v[at] - (kc * start) @ hc)).sum(-1) + (dl * scores).sum(-1)
            d_sum = qc * dqc + kc * row_k - kc * column_k
            d_sum[:, -1] += (hc * dhc).sum(-1) * start[:, -1] + (kc * dkg * to_end).sum(1)
            da[at] = np.flip(np.cumsum(np.flip(d_sum, 1), 1), 1)
            dq[at], dk[at], dv[at] = dqc, row_k + column_k, b * y
    if rstds is not None:
        dq, dk = (r[..., None] * (d - (d * x).sum(-1, keepdims=True) * x) for d, x, r in zip((dq, dk), (q, k), rstds, strict=True))
    if gains[0]:
        db = db * gains[1] * sig * (1 - sig)
    rate = np.exp(a_log).reshape(1, hv, 1, 1)
    x = raw_g + dt_bias.reshape(1, hv, 1, WIDTH)
    s = 1 / (1 + np.exp(-rate * x if lower_bound is not None else -x))
    dx = da * lower_bound * s * (1 - s) * rate if lower_bound is not None else -rate * s * da
    terms = dx * x if lower_bound is not None else -rate * np.logaddexp(0, x) * da
    return dq, dk, dv, db, dx, terms.sum((0, 2, 3)), dx.sum((0, 2)).reshape(-1)


def npu_chunk_kda_merge_fwd_bwd(state, summaries, pre_or_post_num_ranks, rank, *, forward=True, state_v_first=False):
    calls.append("merge_fwd_bwd")
    ranks, heads = summaries.shape[:2]
    need_tensor("summaries", summaries, F32, (ranks, heads, WIDTH, 2 * WIDTH))
    need_tensor("state", state, F32, (heads, WIDTH, WIDTH))
    need(pre_or_post_num_ranks >= 1, f"pre_or_post_num_ranks must be >= 1, but got {pre_or_post_num_ranks}")
    order = range(rank - pre_or_post_num_ranks, rank) if forward else range(rank + pre_or_post_num_ranks, rank, -1)
    need(0 <= rank < ranks and all(0 <= r < ranks for r in order), f"rank {rank} and {pre_or_post_num_ranks} ranks do not fit {ranks}")
    gathered = read(summaries)
    merged = np.zeros((heads, WIDTH, WIDTH), np.float32)  # the old state is never read
    for r in order:
        merged = gathered[r, :, :, WIDTH:] @ merged + gathered[r, :, :, :WIDTH]
    state[:] = f32(np.swapaxes(merged, -1, -2) if state_v_first else merged)  # in place, as the document says
    return state
