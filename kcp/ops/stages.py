"""The nine explicit stages: local tensor ops with no autodiff and no communication (section 5 of the Hyper-Parallel document).

Shapes: B batch (1 for packed and NTD/TND inputs), Hk key heads, Hv value heads, T tokens, C = chunk_size, Nc chunks in all, N sequences
(N = B when dense). Caches are float32, head-major and indexed by token: row t belongs to token t, a column of Aqk or Akk to a position in
t's chunk. ``docs/ops.md`` has the whole contract in one table. Source of the mathematics: KDA paper, chunkwise form; section 2 of the
design. Every stage refuses wrong input with a ValueError or TypeError, and a gradient through it with a TypeError.
"""

from collections.abc import Sequence

from mindspore import Tensor

from kcp.ops.chunk_kda import resolve_scale
from kcp.ops.numerics import in_graph
from kcp.ops.options import STORAGE, check_flag, describe, is_host_boundaries, require_tensor
from kcp.ops.stage_cells import (
    CACHE_SLOTS,
    FLOAT32,
    RSTD_SLOTS,
    check_d_o,
    check_layout,
    check_merge,
    check_norm_pair,
    check_prepare,
    check_stage,
    checked_boundaries,
    merge_cell,
    or_placeholder,
    stage_cell,
)

Boundaries = Sequence[int] | Tensor | None


def chunk_kda_fwd_prepare(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None = None, chunk_size: int = 64, *,
    layout: str = "BNSD", a_log: Tensor | None = None, dt_bias: Tensor | None = None, cu_seqlens: Boundaries = None,
    chunk_indices: Sequence | None = None, epsilon: float = 1e-6, use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False, use_beta_sigmoid_in_kernel: bool = False, allow_neg_eigval: bool = False,
    safe_gate: bool = False, lower_bound: float = -5.0, use_exp2: bool = True, backward_mode: str = "save",
) -> tuple:  # fmt: skip
    """Stage 1: norms, gate, decays and the solve of every chunk.

    With G the chunk-local cumulative log2 decay: ``Aqk_ij = scale sum_d q_id k_jd 2^(G_id - G_jd)`` (j <= i),
    ``Akk = (I + L)^-1``, ``w = Akk (beta k 2^G)``, ``u = Akk (beta v)``, ``qg = q 2^G``, ``kg = k 2^(G_last - G)``.

    Args:
        q, k, v, g, beta, a_log, dt_bias: as in :func:`kcp.ops.chunk_kda`, in ``layout``, float32, float16 or bfloat16 (a_log and dt_bias
            float32).
        scale, chunk_size, layout, cu_seqlens, chunk_indices, epsilon, use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel,
            allow_neg_eigval, safe_gate, lower_bound: as in :func:`kcp.ops.chunk_kda`.
        use_gate_in_kernel: as there, but False by default: g is the log decay.
        use_exp2: gk in log2; otherwise in natural log.
        backward_mode: which caches to return: "none" (0, 1, 3, 4, 6, 7), "forward" (none + 2), "recompute" (none + 8..12), "save" (all).

    Returns:
        Thirteen slots, float32, None where not asked for: ``gk [B,Hv,T,K]`` (G, in natural log without ``use_exp2``),
        ``Aqk [B,Hv,T,C]``, ``Akk [B,Hv,T,C]``, ``w [B,Hv,T,K]``, ``u [B,Hv,T,V]``, ``qg``, ``kg``, ``qg_scaled [B,Hv,T,K]``,
        ``q_hat``, ``k_hat [B,Hk,T,K]``, ``q_rstd``, ``k_rstd [B,Hk,T]`` (None without the in-kernel norm), ``beta_eff [B,Hv,T]``.

    Raises:
        ValueError, TypeError: naming the argument, what it got and what is allowed.

    Source: section 5.1 of the Hyper-Parallel document.
    """
    require_tensor("q", q)
    require_tensor("k", k)
    require_tensor("v", v)
    require_tensor("g", g)
    require_tensor("beta", beta)
    require_tensor("a_log", a_log, True)
    require_tensor("dt_bias", dt_bias, True)
    count = cu_seqlens.shape[0] - 1 if isinstance(cu_seqlens, Tensor) else None
    if is_host_boundaries(cu_seqlens):
        count = len(cu_seqlens) - 1
    infos = (describe(q), describe(k), describe(v), describe(g), describe(beta), describe(a_log), describe(dt_bias))
    num_tokens, batch, width = check_prepare(infos, layout, count, backward_mode)
    host, tensor = checked_boundaries(cu_seqlens, num_tokens)
    names = ("scale", "chunk_size", "layout", "has_a_log", "has_dt_bias", "epsilon", "use_qk_l2norm_in_kernel", "use_gate_in_kernel",
             "use_beta_sigmoid_in_kernel", "allow_neg_eigval", "safe_gate", "lower_bound", "use_exp2")  # fmt: skip
    values = (resolve_scale(scale, width), chunk_size, layout, a_log is not None, dt_bias is not None, epsilon, use_qk_l2norm_in_kernel,
              use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, safe_gate, lower_bound, use_exp2)  # fmt: skip
    stage = stage_cell("fwd_prepare", names, values, host, describe(tensor), num_tokens, batch, chunk_indices)
    caches = stage((q, k, v, g, beta, or_placeholder(a_log), or_placeholder(dt_bias), or_placeholder(tensor)))
    out = ()
    for i in range(13):
        wanted = i in CACHE_SLOTS[backward_mode] and (use_qk_l2norm_in_kernel or i not in RSTD_SLOTS)
        out = out + (caches[i] if wanted else None,)
    return out


def chunk_kda_pre_process_fwd(
    k: Tensor, w: Tensor, u: Tensor, *, gk: Tensor, cu_seqlens: Boundaries = None, chunk_size: int = 64, use_exp2: bool = True
) -> tuple[Tensor]:
    """Stage 2: affine summary of every local sequence, ``H_out = M H_in + E`` (per chunk ``E <- 2^G_last E + kg^T (u - w E)``,
    ``M <- (diag(2^G_last) - kg^T w) M``).

    Args:
        k: kg ``[B,Hv,T,K]`` float32, from :func:`chunk_kda_fwd_prepare`, like w ``[B,Hv,T,K]``, u ``[B,Hv,T,V]`` and gk ``[B,Hv,T,K]``.
        w, u, gk: see k.
        cu_seqlens, chunk_size, use_exp2: as given to :func:`chunk_kda_fwd_prepare`.

    Returns:
        One float32 tensor in a tuple, ``[N,Hv,K,V+K]``, last axis ``[E | M]``.

    Raises:
        ValueError, TypeError: naming the argument, what it got and what is allowed.

    Source: section 5.1 of the Hyper-Parallel document.
    """
    host, tensor = check_stage(("k", "w", "u", "gk"), (k, w, u, gk), (), ("B Hv T K", "B Hv T K", "B Hv T V", "B Hv T K"),
                               (FLOAT32,) * 4, cu_seqlens, chunk_size)  # fmt: skip
    stage = stage_cell("pre_process_fwd", ("chunk_size", "use_exp2", "safe_gate"), (chunk_size, use_exp2, True), host, describe(tensor),
                       k.shape[2], k.shape[0], None)  # fmt: skip
    return (stage((k, w, u, gk, or_placeholder(tensor))),)


def chunk_kda_fwd_h(
    k: Tensor, w: Tensor, u: Tensor, *, gk: Tensor, initial_state: Tensor | None = None, output_final_state: bool = False,
    chunk_size: int = 64, cu_seqlens: Boundaries = None, chunk_indices: Sequence | None = None, use_exp2: bool = True,
    state_v_first: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Stage 3: the state recurrence from given boundary states, ``v_new = u - w h``, ``h' = 2^G_last h + kg^T v_new``.

    Args:
        k, w, u, gk: as in :func:`chunk_kda_pre_process_fwd` (k is kg).
        initial_state: ``[N,Hv,K,V]`` float32 (``[N,Hv,V,K]`` with ``state_v_first``), zeros if None.
        output_final_state: return the state after the last token of every sequence.
        chunk_size, cu_seqlens, chunk_indices, use_exp2: as given to :func:`chunk_kda_fwd_prepare`.
        state_v_first: initial_state, h and final_state have V before K.

    Returns:
        ``(h [B,Nc,Hv,K,V] at every chunk's start, v_new [B,Hv,T,V], final_state [N,Hv,K,V] or None)``, float32; h and final_state
        V-first with ``state_v_first``.

    Raises:
        ValueError, TypeError: naming the argument, what it got and what is allowed.

    Source: section 5.1 of the Hyper-Parallel document.
    """
    check_flag("output_final_state", output_final_state)
    state = "N Hv V K" if state_v_first else "N Hv K V"
    host, tensor = check_stage(
        ("k", "w", "u", "gk", "initial_state"), (k, w, u, gk, initial_state), ("initial_state",),
        ("B Hv T K", "B Hv T K", "B Hv T V", "B Hv T K", state), (FLOAT32,) * 5, cu_seqlens, chunk_size,
    )  # fmt: skip
    names = ("chunk_size", "use_exp2", "state_v_first", "has_initial_state", "safe_gate")
    values = (chunk_size, use_exp2, state_v_first, initial_state is not None, True)
    stage = stage_cell("fwd_h", names, values, host, describe(tensor), k.shape[2], k.shape[0], chunk_indices)
    h, v_new, final_state = stage((k, w, u, gk, or_placeholder(initial_state), or_placeholder(tensor)))
    return h, v_new, final_state if output_final_state else None


def chunk_kda_fwd_finalize(
    qg_scaled: Tensor, aqk: Tensor, v_new: Tensor, h: Tensor, *, output_layout: str = "BSND", state_v_first: bool = False,
    cu_seqlens: Boundaries = None, chunk_indices: Sequence | None = None,
) -> Tensor:  # fmt: skip
    """Stage 4: the attention output, ``o = scale qg h + Aqk v_new``.

    Args:
        qg_scaled, aqk: ``[B,Hv,T,K]`` and ``[B,Hv,T,C]`` float32, from :func:`chunk_kda_fwd_prepare`; C is the chunk size.
        v_new, h: ``[B,Hv,T,V]`` and ``[B,Nc,Hv,K,V]`` (V-first with ``state_v_first``) float32, from :func:`chunk_kda_fwd_h`.
        output_layout: layout of the result; NTD and TND need B = 1.
        state_v_first: h has V before K.
        cu_seqlens, chunk_indices: as given to :func:`chunk_kda_fwd_prepare`.

    Returns:
        Attention output, float32, e.g. ``[B,T,Hv,V]`` for BSND.

    Raises:
        ValueError, TypeError: naming the argument, what it got and what is allowed.

    Source: section 5.1 of the Hyper-Parallel document.
    """
    host, tensor = check_stage(
        ("qg_scaled", "aqk", "v_new", "h"), (qg_scaled, aqk, v_new, h), (),
        ("B Hv T K", "B Hv T C", "B Hv T V", "B Nc Hv V K" if state_v_first else "B Nc Hv K V"), (FLOAT32,) * 4, cu_seqlens, None,
    )  # fmt: skip
    check_layout("output_layout", output_layout, aqk.shape[0])
    names, values = ("chunk_size", "layout", "state_v_first", "safe_gate"), (aqk.shape[3], output_layout, state_v_first, True)
    stage = stage_cell("fwd_finalize", names, values, host, describe(tensor), aqk.shape[2], aqk.shape[0], chunk_indices)
    return stage((qg_scaled, aqk, v_new, h, or_placeholder(tensor)))


def chunk_kda_bwd_prepare(
    aqk: Tensor, v_new: Tensor, d_o: Tensor, h: Tensor, *, scale: float | None = None, layout: str = "BNSD", chunk_size: int = 64,
    state_v_first: bool = False, cu_seqlens: Boundaries = None, chunk_indices: Sequence | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Stage 5: gradients that depend on the output alone.

    Args:
        aqk, v_new, h: as in :func:`chunk_kda_fwd_finalize`.
        d_o: gradient of the attention output in ``layout``, float32, float16 or bfloat16.
        scale: as given to :func:`chunk_kda_fwd_prepare`; None means K^-1/2.
        layout: of d_o alone; NTD and TND need B = 1.
        chunk_size, cu_seqlens, chunk_indices: as given to :func:`chunk_kda_fwd_prepare`.
        state_v_first: h has V before K.

    Returns:
        ``(dAqk = scale tril(do v_new^T) [B,Hv,T,C], dv_local = Aqk^T do [B,Hv,T,V], dq_raw = do h^T [B,Hv,T,K])``, float32.

    Raises:
        ValueError, TypeError: naming the argument, what it got and what is allowed.

    Source: section 5.2 of the Hyper-Parallel document.
    """
    host, tensor = check_stage(
        ("aqk", "v_new", "h"), (aqk, v_new, h), (),
        ("B Hv T C", "B Hv T V", "B Nc Hv V K" if state_v_first else "B Nc Hv K V"), (FLOAT32,) * 3, cu_seqlens, chunk_size,
    )  # fmt: skip
    require_tensor("d_o", d_o)
    check_layout("layout", layout, aqk.shape[0])
    check_d_o(describe(d_o), describe(v_new), layout)
    width = h.shape[4] if state_v_first else h.shape[3]
    names = ("scale", "layout", "chunk_size", "state_v_first", "safe_gate")
    values = (resolve_scale(scale, width), layout, chunk_size, state_v_first, True)
    stage = stage_cell("bwd_prepare", names, values, host, describe(tensor), aqk.shape[2], aqk.shape[0], chunk_indices)
    return stage((aqk, v_new, d_o, h, or_placeholder(tensor)))


def chunk_kda_pre_process_bwd(
    q: Tensor, k: Tensor, w: Tensor, d_o: Tensor, dv: Tensor, scale: float | None = None, chunk_size: int = 64, *, gk: Tensor,
    cu_seqlens: Boundaries = None, use_exp2: bool = True,
) -> Tensor:  # fmt: skip
    """Stage 6: backward affine summary of every local sequence, ``dH_in = dM dH_out + dE`` (dM = M^T).

    Args:
        q, k, w, gk: qg (unscaled), kg, w and gk ``[B,Hv,T,K]`` float32, from :func:`chunk_kda_fwd_prepare`.
        d_o: gradient of the attention output, head-major ``[B,Hv,T,V]``, float32, float16 or bfloat16.
        dv: dv_local ``[B,Hv,T,V]`` float32, from :func:`chunk_kda_bwd_prepare`.
        scale, chunk_size, cu_seqlens, use_exp2: as given to :func:`chunk_kda_fwd_prepare`.

    Returns:
        ``[N,Hv,K,V+K]`` float32, last axis ``[dE | dM]``.

    Raises:
        ValueError, TypeError: naming the argument, what it got and what is allowed.

    Source: section 5.2 of the Hyper-Parallel document.
    """
    stage, tensor = _backward_scan_stage(
        "pre_process_bwd", q, k, w, d_o, dv, gk, None, None, scale, chunk_size, cu_seqlens, None, use_exp2, False
    )
    return stage((q, k, w, d_o, dv, gk, or_placeholder(tensor)))


def chunk_kda_bwd_dhu(
    q: Tensor, k: Tensor, w: Tensor, d_o: Tensor, dv: Tensor, scale: float | None = None, chunk_size: int = 64, *, gk: Tensor,
    h0: Tensor | None = None, dht: Tensor | None = None, cu_seqlens: Boundaries = None, chunk_indices: Sequence | None = None,
    use_exp2: bool = True, state_v_first: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor]:  # fmt: skip
    """Stage 7: the state recurrence backwards, ``dv_new = dv_local + kg dh``, ``dh' = 2^G_last dh + scale qg^T do - w^T dv_new``.

    Args:
        q, k, w, d_o, dv, gk: as in :func:`chunk_kda_pre_process_bwd` (q is qg, k is kg, dv is dv_local).
        scale, chunk_size, cu_seqlens, chunk_indices, use_exp2: as given to :func:`chunk_kda_fwd_prepare`.
        h0: initial states ``[N,Hv,K,V]`` float32; only asks for dh0, its values are not read.
        dht: gradients of the final states ``[N,Hv,K,V]`` float32, zeros if None.
        state_v_first: h0, dht and dh0 have V before K.

    Returns:
        ``(dh [B,Nc,Hv,K,V] at every chunk's end, always K-first; dh0 [N,Hv,K,V] if h0 is given, else None; dv_scan [B,Hv,T,V])``,
        float32.

    Raises:
        ValueError, TypeError: naming the argument, what it got and what is allowed.

    Source: section 5.2 of the Hyper-Parallel document.
    """
    stage, tensor = _backward_scan_stage("bwd_dhu", q, k, w, d_o, dv, gk, h0, dht, scale, chunk_size, cu_seqlens, chunk_indices, use_exp2,
                                         state_v_first)  # fmt: skip
    dh, dh0, dv_scan = stage((q, k, w, d_o, dv, gk, or_placeholder(dht), or_placeholder(tensor)))
    return dh, None if h0 is None else dh0, dv_scan


def _backward_scan_stage(name, q, k, w, d_o, dv, gk, h0, dht, scale, chunk_size, cu_seqlens, chunk_indices, use_exp2, state_v_first):
    state = "N Hv V K" if state_v_first else "N Hv K V"
    host, tensor = check_stage(
        ("q", "k", "w", "d_o", "dv", "gk", "h0", "dht"), (q, k, w, d_o, dv, gk, h0, dht), ("h0", "dht"),
        ("B Hv T K", "B Hv T K", "B Hv T K", "B Hv T V", "B Hv T V", "B Hv T K", state, state),
        (FLOAT32, FLOAT32, FLOAT32, STORAGE, FLOAT32, FLOAT32, FLOAT32, FLOAT32), cu_seqlens, chunk_size,
    )  # fmt: skip
    names = ("scale", "chunk_size", "use_exp2", "state_v_first", "has_initial_state", "safe_gate")
    values = (resolve_scale(scale, k.shape[3]), chunk_size, use_exp2, state_v_first, dht is not None, True)
    return stage_cell(name, names, values, host, describe(tensor), k.shape[2], k.shape[0], chunk_indices), tensor


def chunk_kda_bwd_finalize(
    q: Tensor, k: Tensor, v: Tensor, gk: Tensor, raw_g: Tensor, beta: Tensor, a_log: Tensor | None, dt_bias: Tensor | None,
    akk: Tensor, v_new: Tensor, h: Tensor, dh: Tensor, dv_scan: Tensor, d_aqk: Tensor, dq_raw: Tensor, *,
    scale: float | None = None, lower_bound: float = -5.0, chunk_size: int = 64, safe_gate: bool = True,
    use_gate_in_kernel: bool = True, use_exp2: bool = True, state_v_first: bool = False, q_rstd: Tensor | None = None,
    k_rstd: Tensor | None = None, cu_seqlens: Boundaries = None, chunk_indices: Sequence | None = None,
    use_beta_sigmoid_in_kernel: bool = False, allow_neg_eigval: bool = False, output_layout: str = "BNSD",
) -> tuple:  # fmt: skip
    """Stage 8: every input gradient from the chunk-local and the state gradients (design section 2, backward of a chunk).

    Args:
        q, k: q_hat, k_hat ``[B,Hk,T,K]`` of :func:`chunk_kda_fwd_prepare` (q and k themselves without the in-kernel norm).
        v, raw_g, beta: ``[B,Hv,T,V]``, ``[B,Hv,T,K]``, ``[B,Hv,T]`` as given to :func:`chunk_kda_fwd_prepare`, but head-major; beta raw
            with ``use_beta_sigmoid_in_kernel``. Like q and k float32, float16 or bfloat16.
        a_log, dt_bias: as given to :func:`chunk_kda_fwd_prepare`, or None.
        gk, akk: ``[B,Hv,T,K]``, ``[B,Hv,T,C]`` float32, from :func:`chunk_kda_fwd_prepare`.
        v_new, h: ``[B,Hv,T,V]``, ``[B,Nc,Hv,K,V]`` float32, from :func:`chunk_kda_fwd_h`.
        dh, dv_scan: ``[B,Nc,Hv,K,V]`` (always K-first), ``[B,Hv,T,V]`` float32, from :func:`chunk_kda_bwd_dhu`.
        d_aqk, dq_raw: ``[B,Hv,T,C]``, ``[B,Hv,T,K]`` float32, from :func:`chunk_kda_bwd_prepare`.
        scale, lower_bound, chunk_size, safe_gate, use_gate_in_kernel, use_exp2, cu_seqlens, chunk_indices, use_beta_sigmoid_in_kernel,
            allow_neg_eigval: as given to :func:`chunk_kda_fwd_prepare` (the gate's defaults differ).
        state_v_first: h has V before K.
        q_rstd, k_rstd: ``[B,Hk,T]`` float32 of the in-kernel norm; None: q and k were not normalised here.
        output_layout: layout of the token gradients; NTD and TND need B = 1.

    Returns:
        ``(dq, dk, dv, dbeta, dg)`` in ``output_layout`` and ``dA_log [Hv]``, ``ddt_bias`` (shape of dt_bias), float32; the last two
        None where their input is.

    Raises:
        ValueError, TypeError: naming the argument, what it got and what is allowed.

    Source: section 5.2 of the Hyper-Parallel document.
    """
    host, tensor = check_stage(
        ("q", "k", "v", "gk", "raw_g", "beta", "a_log", "dt_bias", "akk", "v_new", "h", "dh", "dv_scan", "d_aqk", "dq_raw", "q_rstd",
         "k_rstd"),
        (q, k, v, gk, raw_g, beta, a_log, dt_bias, akk, v_new, h, dh, dv_scan, d_aqk, dq_raw, q_rstd, k_rstd),
        ("a_log", "dt_bias", "q_rstd", "k_rstd"),
        ("B Hk T K", "B Hk T K", "B Hv T V", "B Hv T K", "B Hv T K", "B Hv T", "Hv", "Hv K|Hv*K", "B Hv T C", "B Hv T V",
         "B Nc Hv V K" if state_v_first else "B Nc Hv K V", "B Nc Hv K V", "B Hv T V", "B Hv T C", "B Hv T K", "B Hk T", "B Hk T"),
        (STORAGE, STORAGE, STORAGE, FLOAT32, STORAGE, STORAGE) + (FLOAT32,) * 11, cu_seqlens, chunk_size,
    )  # fmt: skip
    check_norm_pair(q_rstd is None, k_rstd is None)
    check_layout("output_layout", output_layout, k.shape[0])
    names = ("scale", "lower_bound", "chunk_size", "safe_gate", "use_gate_in_kernel", "use_exp2", "state_v_first", "has_a_log",
             "has_dt_bias", "use_qk_l2norm_in_kernel", "use_beta_sigmoid_in_kernel", "allow_neg_eigval", "layout")  # fmt: skip
    values = (resolve_scale(scale, k.shape[3]), lower_bound, chunk_size, safe_gate, use_gate_in_kernel, use_exp2, state_v_first,
              a_log is not None, dt_bias is not None, q_rstd is not None, use_beta_sigmoid_in_kernel, allow_neg_eigval,
              output_layout)  # fmt: skip
    stage = stage_cell("bwd_finalize", names, values, host, describe(tensor), k.shape[2], k.shape[0], chunk_indices)
    grads = stage((q, k, v, gk, raw_g, beta, or_placeholder(a_log), or_placeholder(dt_bias), akk, v_new, h, dh, dv_scan, d_aqk, dq_raw,
                  or_placeholder(q_rstd), or_placeholder(k_rstd), or_placeholder(tensor)))  # fmt: skip
    return grads[:5] + (None if a_log is None else grads[5], None if dt_bias is None else grads[6])


def chunk_kda_merge_fwd_bwd(
    state: Tensor, summaries: Tensor, pre_or_post_num_ranks: int, rank: int, *, forward: bool = True, state_v_first: bool = False
) -> Tensor:
    """Stage 9: compose gathered summaries into this rank's boundary state, ``H <- M_r H + E_r`` from zero.

    Args:
        state: ``[Hv,K,V]`` or ``[N,Hv,K,V]`` float32 (V-first with ``state_v_first``); gives the shape, its values are never read.
        summaries: all ranks' ``[S,Hv,K,V+K]`` or ``[S,N,Hv,K,V+K]`` float32, rank order = time order.
        pre_or_post_num_ranks: n, how many ranks take part; n = 0 yields zeros.
        rank: this rank. Forward takes ranks rank-n .. rank-1 in time order, backward rank+n .. rank+1, farthest first.
        forward: the summaries are ``[E | M]`` of the forward; False: ``[dE | dM]`` of the backward.
        state_v_first: state and the result have V before K; summaries never do.

    Returns:
        The new state, shape of ``state``, float32.

    Raises:
        ValueError, TypeError: naming the argument, what it got and what is allowed.

    Source: section 5.3 of the Hyper-Parallel document.
    """
    require_tensor("state", state)
    require_tensor("summaries", summaries)
    ranks = check_merge(describe(state), describe(summaries), pre_or_post_num_ranks, rank, forward, state_v_first)
    return merge_cell(state_v_first, ranks, in_graph())(summaries)
