"""The nine explicit stages: local tensor ops with no autodiff and no communication (section 5 of the Hyper-Parallel document).

Shapes: B batch (1 for packed and NTD/TND inputs), Hk key heads, Hv value heads, T tokens, C = chunk_size, Nc chunks in all, N sequences
(N = B when dense). Caches are float32, head-major and indexed by token: row t belongs to token t, a column of Aqk or Akk to a position in
t's chunk. ``docs/ops.md`` has the whole contract in one table.
"""

from functools import lru_cache

import mindspore as ms
from mindspore import Tensor, nn, ops
from mindspore.ops import constexpr

from kcp.ops import backends
from kcp.ops.chunk_kda import boundaries_of, check_boundary_info, resolve_scale
from kcp.ops.numerics import in_graph
from kcp.ops.options import (
    BACKWARD_MODES,
    STORAGE,
    KdaOptions,
    check_choice,
    check_chunk_indices,
    check_cu_seqlens,
    check_flag,
    check_inputs,
    check_tensor,
    describe,
    is_host_boundaries,
    require_tensor,
)

_SLOTS = {  # backward_mode -> positions of the thirteen caches that are returned
    "none": (0, 1, 3, 4, 6, 7),
    "forward": (0, 1, 2, 3, 4, 6, 7),
    "recompute": (0, 1, 3, 4, 6, 7, 8, 9, 10, 11, 12),
    "save": tuple(range(13)),
}
_RSTD_SLOTS = (10, 11)
_FLOAT32 = ("Float32",)


@constexpr(check=False)
def _refuse_gradient(stage):
    raise TypeError(
        f"chunk_kda_{stage} is not differentiable; allowed: chunk_kda for automatic gradients, or the backward stages called explicitly"
    )


class _Stage(nn.Cell):
    """One stage with its options fixed; a gradient through it is refused."""

    def __init__(self, stage, opts):
        super().__init__(auto_prefix=False)
        self.stage = stage
        self.opts = opts
        self.run = getattr(backends.select(stage), stage)

    def construct(self, tensors):
        return self.run(self.opts, *tensors)

    def bprop(self, tensors, out, dout):
        _refuse_gradient(self.stage)
        return (tensors,)


@lru_cache(512)
def _cached_stage(stage, opts, backend_name):
    return _Stage(stage, opts)


@constexpr(check=False)
def _stage(stage, names, values, cu, boundaries, num_tokens, batch, chunk_indices):
    """The Cell of a stage for options ``names = values``; ``cu`` host boundaries or None, ``boundaries`` (shape, dtype) of a Tensor."""
    options = dict(zip(names, values, strict=True))
    options["scale"] = options.get("scale", 1.0)
    if (cu is not None or boundaries is not None) and batch != 1:
        raise ValueError(f"cu_seqlens is given with B={batch}; allowed: B=1 (flatten the batch into one pack)")
    if cu is not None:
        cu = check_cu_seqlens(cu, num_tokens)
        check_chunk_indices(chunk_indices, cu, options.get("chunk_size", 64))
    elif boundaries is not None:
        check_boundary_info(boundaries)
        cu = "tensor"
    opts = KdaOptions(cu_seqlens=cu, **options)
    return _cached_stage(stage, opts, backends.select(stage).__name__)


@constexpr(check=False)
def _check_caches(names, infos, dims, dtypes, num_v_heads_of):
    """Check caches against each other: parallel tuples of names, ``(shape, dtype)``, axis names and allowed dtypes."""
    sizes = {}
    for name, info, axes, allowed in zip(names, infos, dims, dtypes, strict=True):
        if info is not None:
            check_tensor(name, info, axes, sizes, allowed)
    if num_v_heads_of and sizes["Hv"] % sizes["Hk"]:
        raise ValueError(f"{num_v_heads_of} has Hv={sizes['Hv']} heads, q and k Hk={sizes['Hk']}; allowed: Hv a multiple of Hk")


def _boundaries(cu_seqlens, num_tokens):
    """``(host tuple or None, Tensor or None)``, a Tensor's values checked where they are known."""
    host, tensor = boundaries_of(cu_seqlens)
    if tensor is not None and not in_graph():
        check_cu_seqlens(tensor.asnumpy().tolist(), num_tokens)
    return host, tensor


def _or_placeholder(x):
    return ops.zeros((1,), ms.float32) if x is None else x


@constexpr(check=False)
def _check_prepare(tensors, layout, cu_length, backward_mode):
    q, k, v, g, beta, a_log, dt_bias = tensors
    check_choice("backward_mode", backward_mode, BACKWARD_MODES)
    check_choice("layout", layout, ("BNSD", "BSND", "NTD", "TND"))
    sizes = check_inputs(layout, q, k, v, g, beta, a_log, dt_bias, None, False, cu_length)
    return sizes["T"], sizes["B"], sizes["K"]


def _count(host, tensor):
    if tensor is not None:
        return tensor.shape[0] - 1
    return None if host is None else len(host) - 1


def chunk_kda_fwd_prepare(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None = None, chunk_size: int = 64, *,
    layout: str = "BNSD", a_log: Tensor | None = None, dt_bias: Tensor | None = None, cu_seqlens=None, chunk_indices=None,
    epsilon: float = 1e-6, use_qk_l2norm_in_kernel: bool = False, use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False, allow_neg_eigval: bool = False, safe_gate: bool = False, lower_bound: float = -5.0,
    use_exp2: bool = True, backward_mode: str = "save",
) -> tuple:  # fmt: skip
    """Stage 1: norms, gate, decays and the solve of every chunk.

    With G the chunk-local cumulative log2 decay: ``Aqk_ij = scale sum_d q_id k_jd 2^(G_id - G_jd)`` (j <= i),
    ``Akk = (I + L)^-1``, ``w = Akk (beta k 2^G)``, ``u = Akk (beta v)``, ``qg = q 2^G``, ``kg = k 2^(G_last - G)``.

    Args:
        q, k, v, g, beta, a_log, dt_bias, and options: as in :func:`kcp.ops.chunk_kda` (here ``use_gate_in_kernel`` defaults to False).
        backward_mode: which caches to return: "none" (0, 1, 3, 4, 6, 7), "forward" (none + 2), "recompute" (none + 8..12), "save" (all).

    Returns:
        Thirteen slots, float32, None where not asked for: ``gk [B,Hv,T,K]`` (G, in natural log without ``use_exp2``),
        ``Aqk [B,Hv,T,C]``, ``Akk [B,Hv,T,C]``, ``w [B,Hv,T,K]``, ``u [B,Hv,T,V]``, ``qg``, ``kg``, ``qg_scaled [B,Hv,T,K]``,
        ``q_hat``, ``k_hat [B,Hk,T,K]``, ``q_rstd``, ``k_rstd [B,Hk,T]`` (None without the in-kernel norm), ``beta_eff [B,Hv,T]``.

    Raises:
        ValueError, TypeError: naming the argument, what it got and what is allowed.
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
    num_tokens, batch, width = _check_prepare(infos, layout, count, backward_mode)
    host, tensor = _boundaries(cu_seqlens, num_tokens)
    names = ("scale", "chunk_size", "layout", "has_a_log", "has_dt_bias", "epsilon", "use_qk_l2norm_in_kernel", "use_gate_in_kernel",
             "use_beta_sigmoid_in_kernel", "allow_neg_eigval", "safe_gate", "lower_bound", "use_exp2")  # fmt: skip
    values = (resolve_scale(scale, width), chunk_size, layout, a_log is not None, dt_bias is not None, epsilon, use_qk_l2norm_in_kernel,
              use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, safe_gate, lower_bound, use_exp2)  # fmt: skip
    stage = _stage("fwd_prepare", names, values, host, describe(tensor), num_tokens, batch, chunk_indices)
    caches = stage((q, k, v, g, beta, _or_placeholder(a_log), _or_placeholder(dt_bias), _or_placeholder(tensor)))
    out = ()
    for i in range(13):
        wanted = i in _SLOTS[backward_mode] and (use_qk_l2norm_in_kernel or i not in _RSTD_SLOTS)
        out = out + (caches[i] if wanted else None,)
    return out


def chunk_kda_pre_process_fwd(
    k: Tensor, w: Tensor, u: Tensor, *, gk: Tensor, cu_seqlens=None, chunk_size: int = 64, use_exp2: bool = True
) -> tuple[Tensor]:
    """Stage 2: affine summary of every local sequence, ``H_out = M H_in + E`` (per chunk ``E <- 2^G_last E + kg^T (u - w E)``,
    ``M <- (diag(2^G_last) - kg^T w) M``).

    Args:
        k: kg ``[B,Hv,T,K]``; w ``[B,Hv,T,K]``; u ``[B,Hv,T,V]``; gk ``[B,Hv,T,K]``, float32, from :func:`chunk_kda_fwd_prepare`.

    Returns:
        One float32 tensor in a tuple, ``[N,Hv,K,V+K]``, last axis ``[E | M]``.
    """
    _check_caches(("k", "w", "u", "gk"), (describe(k), describe(w), describe(u), describe(gk)),
                  ("B Hv T K", "B Hv T K", "B Hv T V", "B Hv T K"), (_FLOAT32,) * 4, "")  # fmt: skip
    host, tensor = _boundaries(cu_seqlens, k.shape[2])
    stage = _stage("pre_process_fwd", ("chunk_size", "use_exp2", "safe_gate"), (chunk_size, use_exp2, True), host, describe(tensor),
                   k.shape[2], k.shape[0], None)  # fmt: skip
    return (stage((k, w, u, gk, _or_placeholder(tensor))),)


def chunk_kda_fwd_h(
    k: Tensor, w: Tensor, u: Tensor, *, gk: Tensor, initial_state: Tensor | None = None, output_final_state: bool = False,
    chunk_size: int = 64, cu_seqlens=None, chunk_indices=None, use_exp2: bool = True, state_v_first: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Stage 3: the state recurrence from given boundary states, ``v_new = u - w h``, ``h' = 2^G_last h + kg^T v_new``.

    Args:
        k, w, u, gk: as in :func:`chunk_kda_pre_process_fwd`.
        initial_state: ``[N,Hv,K,V]`` float32 (``[N,Hv,V,K]`` with ``state_v_first``), zeros if None.

    Returns:
        ``(h [B,Nc,Hv,K,V] at every chunk's start, v_new [B,Hv,T,V], final_state [N,Hv,K,V] or None)``; h and final_state V-first
        with ``state_v_first``.
    """
    check_flag("output_final_state", output_final_state)
    host, tensor = _boundaries(cu_seqlens, k.shape[2])
    rows = "N" if cu_seqlens is not None else "B"
    state = rows + " Hv V K" if state_v_first else rows + " Hv K V"
    _check_caches(("k", "w", "u", "gk", "initial_state"),
                  (describe(k), describe(w), describe(u), describe(gk), describe(initial_state)),
                  ("B Hv T K", "B Hv T K", "B Hv T V", "B Hv T K", state), (_FLOAT32,) * 5, "")  # fmt: skip
    _check_state_count("initial_state", describe(initial_state), _count(host, tensor))
    names = ("chunk_size", "use_exp2", "state_v_first", "has_initial_state", "safe_gate")
    values = (chunk_size, use_exp2, state_v_first, initial_state is not None, True)
    stage = _stage("fwd_h", names, values, host, describe(tensor), k.shape[2], k.shape[0], chunk_indices)
    h, v_new, final_state = stage((k, w, u, gk, _or_placeholder(initial_state), _or_placeholder(tensor)))
    return h, v_new, final_state if output_final_state else None


@constexpr(check=False)
def _check_state_count(name, info, count):
    if info is not None and count is not None and info[0][0] != count:
        raise ValueError(f"{name} has shape {tuple(info[0])}; allowed: N={count} states, one a sequence of cu_seqlens")


def chunk_kda_fwd_finalize(
    qg_scaled: Tensor, aqk: Tensor, v_new: Tensor, h: Tensor, *, output_layout: str = "BSND", state_v_first: bool = False,
    cu_seqlens=None, chunk_indices=None,
) -> Tensor:  # fmt: skip
    """Stage 4: the attention output, ``o = scale qg h + Aqk v_new``.

    Args:
        qg_scaled: ``[B,Hv,T,K]``; aqk ``[B,Hv,T,C]``; v_new ``[B,Hv,T,V]``; h ``[B,Nc,Hv,K,V]`` (V-first with ``state_v_first``), float32.
        output_layout: layout of the result.

    Returns:
        Attention output, float32, e.g. ``[B,T,Hv,V]`` for BSND.
    """
    _check_caches(("qg_scaled", "aqk", "v_new", "h"), (describe(qg_scaled), describe(aqk), describe(v_new), describe(h)),
                  ("B Hv T K", "B Hv T C", "B Hv T V", "B Nc Hv V K" if state_v_first else "B Nc Hv K V"), (_FLOAT32,) * 4, "")  # fmt: skip
    host, tensor = _boundaries(cu_seqlens, aqk.shape[2])
    stage = _stage("fwd_finalize", ("chunk_size", "layout", "state_v_first", "safe_gate"), (aqk.shape[3], output_layout, state_v_first, True),
                   host, describe(tensor), aqk.shape[2], aqk.shape[0], chunk_indices)  # fmt: skip
    return stage((qg_scaled, aqk, v_new, h, _or_placeholder(tensor)))


def chunk_kda_bwd_prepare(
    aqk: Tensor, v_new: Tensor, d_o: Tensor, h: Tensor, *, scale: float | None = None, layout: str = "BNSD", chunk_size: int = 64,
    state_v_first: bool = False, cu_seqlens=None, chunk_indices=None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Stage 5: gradients that depend on the output alone.

    Args:
        aqk: ``[B,Hv,T,C]``; v_new ``[B,Hv,T,V]``; h ``[B,Nc,Hv,K,V]``, float32.
        d_o: gradient of the attention output in ``layout``, float32, float16 or bfloat16.
        scale: as given to :func:`chunk_kda_fwd_prepare`; None means K^-1/2.

    Returns:
        ``(dAqk = scale tril(do v_new^T) [B,Hv,T,C], dv_local = Aqk^T do [B,Hv,T,V], dq_raw = do h^T [B,Hv,T,K])``, float32.
    """
    _check_caches(("aqk", "v_new", "h"), (describe(aqk), describe(v_new), describe(h)),
                  ("B Hv T C", "B Hv T V", "B Nc Hv V K" if state_v_first else "B Nc Hv K V"), (_FLOAT32,) * 3, "")  # fmt: skip
    _check_d_o(describe(d_o), describe(v_new), layout)
    host, tensor = _boundaries(cu_seqlens, aqk.shape[2])
    width = h.shape[4] if state_v_first else h.shape[3]
    names = ("scale", "layout", "chunk_size", "state_v_first", "safe_gate")
    values = (resolve_scale(scale, width), layout, chunk_size, state_v_first, True)
    stage = _stage("bwd_prepare", names, values, host, describe(tensor), aqk.shape[2], aqk.shape[0], chunk_indices)
    return stage((aqk, v_new, d_o, h, _or_placeholder(tensor)))


@constexpr(check=False)
def _check_d_o(info, v_new, layout):
    check_choice("layout", layout, ("BNSD", "BSND", "NTD", "TND"))
    b, hv, t, v = v_new[0]
    axes = {"BNSD": "B Hv T V", "BSND": "B T Hv V", "NTD": "Hv T V", "TND": "T Hv V"}[layout]
    check_tensor("d_o", info, axes, {"B": b, "Hv": hv, "T": t, "V": v}, STORAGE)


def chunk_kda_pre_process_bwd(
    q: Tensor, k: Tensor, w: Tensor, d_o: Tensor, dv: Tensor, scale: float | None = None, chunk_size: int = 64, *, gk: Tensor,
    cu_seqlens=None, use_exp2: bool = True,
) -> Tensor:  # fmt: skip
    """Stage 6: backward affine summary of every local sequence, ``dH_in = dM dH_out + dE`` (dM = M^T).

    Args:
        q: qg (unscaled) ``[B,Hv,T,K]``; k: kg; w ``[B,Hv,T,K]``; d_o ``[B,Hv,T,V]``; dv: dv_local ``[B,Hv,T,V]``; gk ``[B,Hv,T,K]``.

    Returns:
        ``[N,Hv,K,V+K]`` float32, last axis ``[dE | dM]``.
    """
    stage, tensor = _backward_scan_stage(
        "pre_process_bwd", q, k, w, d_o, dv, gk, None, scale, chunk_size, cu_seqlens, None, use_exp2, False
    )
    return stage((q, k, w, d_o, dv, gk, _or_placeholder(tensor)))


def chunk_kda_bwd_dhu(
    q: Tensor, k: Tensor, w: Tensor, d_o: Tensor, dv: Tensor, scale: float | None = None, chunk_size: int = 64, *, gk: Tensor,
    h0: Tensor | None = None, dht: Tensor | None = None, cu_seqlens=None, chunk_indices=None, use_exp2: bool = True,
    state_v_first: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor]:  # fmt: skip
    """Stage 7: the state recurrence backwards, ``dv_new = dv_local + kg dh``, ``dh' = 2^G_last dh + scale qg^T do - w^T dv_new``.

    Args:
        q, k, w, d_o, dv, gk: as in :func:`chunk_kda_pre_process_bwd`.
        h0: initial states ``[N,Hv,K,V]``; only asks for dh0, its values are not read.
        dht: gradients of the final states ``[N,Hv,K,V]`` float32, zeros if None.

    Returns:
        ``(dh [B,Nc,Hv,K,V] at every chunk's end, always K-first; dh0 [N,Hv,K,V] if h0 is given, else None; dv_scan [B,Hv,T,V])``.
    """
    stage, tensor = _backward_scan_stage("bwd_dhu", q, k, w, d_o, dv, gk, dht, scale, chunk_size, cu_seqlens, chunk_indices, use_exp2,
                                         state_v_first)  # fmt: skip
    dh, dh0, dv_scan = stage((q, k, w, d_o, dv, gk, _or_placeholder(dht), _or_placeholder(tensor)))
    return dh, None if h0 is None else dh0, dv_scan


def _backward_scan_stage(name, q, k, w, d_o, dv, gk, dht, scale, chunk_size, cu_seqlens, chunk_indices, use_exp2, state_v_first):
    rows = "N" if cu_seqlens is not None else "B"
    state = rows + " Hv V K" if state_v_first else rows + " Hv K V"
    _check_caches(("q", "k", "w", "d_o", "dv", "gk", "dht"),
                  (describe(q), describe(k), describe(w), describe(d_o), describe(dv), describe(gk), describe(dht)),
                  ("B Hv T K", "B Hv T K", "B Hv T K", "B Hv T V", "B Hv T V", "B Hv T K", state),
                  (_FLOAT32, _FLOAT32, _FLOAT32, STORAGE, _FLOAT32, _FLOAT32, _FLOAT32), "")  # fmt: skip
    host, tensor = _boundaries(cu_seqlens, k.shape[2])
    _check_state_count("dht", describe(dht), _count(host, tensor))
    names = ("scale", "chunk_size", "use_exp2", "state_v_first", "has_initial_state", "safe_gate")
    values = (resolve_scale(scale, k.shape[3]), chunk_size, use_exp2, state_v_first, dht is not None, True)
    return _stage(name, names, values, host, describe(tensor), k.shape[2], k.shape[0], chunk_indices), tensor


def chunk_kda_bwd_finalize(
    q: Tensor, k: Tensor, v: Tensor, gk: Tensor, raw_g: Tensor, beta: Tensor, a_log: Tensor | None, dt_bias: Tensor | None,
    akk: Tensor, v_new: Tensor, h: Tensor, dh: Tensor, dv_scan: Tensor, d_aqk: Tensor, dq_raw: Tensor, *,
    scale: float | None = None, lower_bound: float = -5.0, chunk_size: int = 64, safe_gate: bool = True,
    use_gate_in_kernel: bool = True, use_exp2: bool = True, state_v_first: bool = False, q_rstd: Tensor | None = None,
    k_rstd: Tensor | None = None, cu_seqlens=None, chunk_indices=None, use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False, output_layout: str = "BNSD",
) -> tuple:  # fmt: skip
    """Stage 8: every input gradient from the chunk-local and the state gradients (design section 2, backward of a chunk).

    Args:
        q, k: q_hat, k_hat ``[B,Hk,T,K]`` of :func:`chunk_kda_fwd_prepare`; v ``[B,Hv,T,V]``; raw_g ``[B,Hv,T,K]``; beta ``[B,Hv,T]``, raw
            with the in-kernel sigmoid: head-major (BNSD), any storage dtype.
        gk ``[B,Hv,T,K]``, akk, d_aqk ``[B,Hv,T,C]``, v_new, dv_scan ``[B,Hv,T,V]``, dq_raw ``[B,Hv,T,K]``, h, dh ``[B,Nc,Hv,K,V]``
            (h V-first with ``state_v_first``): float32.
        q_rstd, k_rstd: ``[B,Hk,T]`` of the in-kernel norm; None: q and k were not normalised here.

    Returns:
        ``(dq, dk, dv, dbeta, dg)`` in ``output_layout`` and ``dA_log [Hv]``, ``ddt_bias`` (shape of dt_bias), float32; the last two
        None where their input is.
    """
    c_states = "B Nc Hv V K" if state_v_first else "B Nc Hv K V"
    bias = "Hv K" if dt_bias is None or dt_bias.ndim == 2 else "HvK"
    _check_caches(
        ("q", "k", "v", "gk", "raw_g", "beta", "a_log", "dt_bias", "akk", "v_new", "h", "dh", "dv_scan", "d_aqk", "dq_raw", "q_rstd", "k_rstd"),
        (describe(q), describe(k), describe(v), describe(gk), describe(raw_g), describe(beta), describe(a_log), describe(dt_bias),
         describe(akk), describe(v_new), describe(h), describe(dh), describe(dv_scan), describe(d_aqk), describe(dq_raw), describe(q_rstd),
         describe(k_rstd)),
        ("B Hk T K", "B Hk T K", "B Hv T V", "B Hv T K", "B Hv T K", "B Hv T", "Hv", bias, "B Hv T C", "B Hv T V", c_states, "B Nc Hv K V",
         "B Hv T V", "B Hv T C", "B Hv T K", "B Hk T", "B Hk T"),
        (STORAGE, STORAGE, STORAGE, _FLOAT32, STORAGE, STORAGE) + (_FLOAT32,) * 11, "v",
    )  # fmt: skip
    _check_norm_pair(q_rstd is None, k_rstd is None)
    host, tensor = _boundaries(cu_seqlens, k.shape[2])
    names = ("scale", "lower_bound", "chunk_size", "safe_gate", "use_gate_in_kernel", "use_exp2", "state_v_first", "has_a_log",
             "has_dt_bias", "use_qk_l2norm_in_kernel", "use_beta_sigmoid_in_kernel", "allow_neg_eigval", "layout")  # fmt: skip
    values = (resolve_scale(scale, k.shape[3]), lower_bound, chunk_size, safe_gate, use_gate_in_kernel, use_exp2, state_v_first,
              a_log is not None, dt_bias is not None, q_rstd is not None, use_beta_sigmoid_in_kernel, allow_neg_eigval, output_layout)  # fmt: skip
    stage = _stage("bwd_finalize", names, values, host, describe(tensor), k.shape[2], k.shape[0], chunk_indices)
    grads = stage((q, k, v, raw_g, beta, _or_placeholder(a_log), _or_placeholder(dt_bias), akk, v_new, h, dh, dv_scan, d_aqk, dq_raw,
                  _or_placeholder(q_rstd), _or_placeholder(k_rstd), _or_placeholder(tensor)))  # fmt: skip
    return grads[:5] + (None if a_log is None else grads[5], None if dt_bias is None else grads[6])


@constexpr(check=False)
def _check_norm_pair(no_q, no_k):
    if no_q != no_k:
        raise ValueError("q_rstd and k_rstd: one is None, the other is not; allowed: both (in-kernel norm) or neither")


@constexpr(check=False)
def _check_merge(state, summaries, count, rank, forward, state_v_first):
    """Check a merge; returns the ranks in the order they are applied."""
    check_flag("forward", forward)
    check_flag("state_v_first", state_v_first)
    for name, value in (("pre_or_post_num_ranks", count), ("rank", rank)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} is {value!r} of type {type(value).__name__}; allowed: an integer")
    batch = "B " if len(state[0]) == 4 else ""
    sizes = {}
    check_tensor("state", state, batch + ("Hv V K" if state_v_first else "Hv K V"), sizes, _FLOAT32)
    sizes["V+K"] = sizes["V"] + sizes["K"]
    check_tensor("summaries", summaries, "S " + batch + "Hv K V+K", sizes, _FLOAT32)
    if not 0 <= rank < sizes["S"]:
        raise ValueError(f"rank is {rank}; allowed: 0 to {sizes['S'] - 1}, there are S={sizes['S']} summaries")
    limit = rank if forward else sizes["S"] - 1 - rank
    if not 0 <= count <= limit:
        side = "before" if forward else "after"
        raise ValueError(f"pre_or_post_num_ranks is {count}; allowed: 0 to {limit}, the ranks {side} rank {rank} of {sizes['S']}")
    return tuple(range(rank - count, rank)) if forward else tuple(range(rank + count, rank, -1))


def chunk_kda_merge_fwd_bwd(
    state: Tensor,
    summaries: Tensor,
    pre_or_post_num_ranks: int,
    rank: int,
    *,
    forward: bool = True,
    state_v_first: bool = False,
) -> Tensor:
    """Stage 9: compose gathered summaries into this rank's boundary state, ``H <- M_r H + E_r`` from zero.

    Args:
        state: ``[Hv,K,V]`` or ``[B,Hv,K,V]`` float32 (V-first with ``state_v_first``); gives the shape, its values are never read.
        summaries: all ranks' ``[S,Hv,K,V+K]`` or ``[S,B,Hv,K,V+K]`` float32, rank order = time order.
        pre_or_post_num_ranks: n, how many ranks take part; n = 0 yields zeros.
        rank: this rank. Forward takes ranks rank-n .. rank-1 in time order, backward rank+n .. rank+1, farthest first.

    Returns:
        The new state, shape of ``state``, float32.
    """
    require_tensor("state", state)
    require_tensor("summaries", summaries)
    ranks = _check_merge(describe(state), describe(summaries), pre_or_post_num_ranks, rank, forward, state_v_first)
    return _merge_stage(state_v_first, ranks)(summaries)


class _Merge(nn.Cell):
    """The merge of fixed ranks; a gradient through it is refused."""

    def __init__(self, opts, ranks):
        super().__init__(auto_prefix=False)
        self.opts = opts
        self.ranks = ranks
        self.run = backends.select("merge_fwd_bwd").merge_fwd_bwd

    def construct(self, summaries):
        return self.run(self.opts, summaries, self.ranks)

    def bprop(self, summaries, out, dout):
        _refuse_gradient("merge_fwd_bwd")
        return (summaries,)


@lru_cache(256)
def _cached_merge(state_v_first, ranks, backend_name):
    return _Merge(KdaOptions(1.0, safe_gate=True, state_v_first=state_v_first), ranks)


@constexpr(check=False)
def _merge_stage(state_v_first, ranks):
    return _cached_merge(state_v_first, ranks, backends.select("merge_fwd_bwd").__name__)
