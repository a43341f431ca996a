"""The explicit stages on the native kernels: shapes, dtypes and calls of ``native/entry_stages.cc``.

Functions have the signatures of the composite backend; caches are float32, head-major and indexed by token.
"""

from functools import lru_cache

import mindspore as ms
import numpy as np
from mindspore import Tensor
from mindspore.ops import constexpr

from kcp.ops.backends.native_call import (
    HAS_A_LOG,
    HAS_CU_SEQLENS,
    HAS_D_FINAL_STATE,
    HAS_DT_BIAS,
    HAS_INITIAL_STATE,
    OUT_TOKEN_MAJOR,
    custom,
    in_layout,
    pack_options,
    sizes,
)
from kcp.ops.numerics import in_graph

F32 = ms.float32


def _num_chunks(opts, cu, tokens):
    """Chunks per batch row; with boundaries in a tensor, the most there can be."""
    size = opts.chunk_size
    if opts.cu_seqlens is None:
        return -(-tokens // size)
    if opts.cu_seqlens == "tensor":
        return max(1, min((tokens + (cu[0] - 1) * (size - 1)) // size, tokens))
    return sum(-(-(e - b) // size) for b, e in zip(opts.cu_seqlens[:-1], opts.cu_seqlens[1:], strict=True))


def _num_sequences(opts, batch, cu):
    return batch if opts.cu_seqlens is None else cu[0] - 1


def _state(opts, key, value):
    return (value, key) if opts.state_v_first else (key, value)


def _fwd_prepare_shapes(opts, options, q, k, v, g, beta, a_log, dt_bias, nothing, cu):
    batch, tokens, heads, key, value = sizes(opts.layout, k, v)
    _, _, key_heads, _, _ = sizes(opts.layout, k, k)
    row, scores = (batch, heads, tokens, key), (batch, heads, tokens, opts.chunk_size)
    key_row = (batch, key_heads, tokens, key)
    rstd = key_row[:3] if opts.use_qk_l2norm_in_kernel else (1,)
    return (row, scores, scores, row, (batch, heads, tokens, value), row, row, row, key_row, key_row, rstd, rstd, row[:3])


def _pre_process_fwd_shapes(opts, options, k, w, u, gk, initial_state, cu):
    return (_num_sequences(opts, k[0], cu), k[1], k[3], u[3] + k[3])


def _fwd_h_shapes(opts, options, k, w, u, gk, initial_state, cu):
    state = _state(opts, k[3], u[3])
    h = (k[0], _num_chunks(opts, cu, k[2]), k[1], *state)
    return h, tuple(u), (_num_sequences(opts, k[0], cu), k[1], *state)


def _fwd_finalize_shapes(opts, options, qg_scaled, aqk, v_new, h, cu):
    return in_layout(opts.layout, *v_new)


def _bwd_prepare_shapes(opts, options, aqk, v_new, d_o, h, cu):
    key = h[4] if opts.state_v_first else h[3]
    return tuple(aqk), tuple(v_new), (*v_new[:3], key)


def _pre_process_bwd_shapes(opts, options, q, k, w, d_o, dv, gk, dht, cu):
    return (_num_sequences(opts, k[0], cu), k[1], k[3], dv[3] + k[3])


def _bwd_dhu_shapes(opts, options, q, k, w, d_o, dv, gk, dht, cu):
    dh = (k[0], _num_chunks(opts, cu, k[2]), k[1], k[3], dv[3])
    return dh, (_num_sequences(opts, k[0], cu), k[1], *_state(opts, k[3], dv[3])), tuple(dv)


def _bwd_finalize_shapes(opts, options, q, k, v, g, beta, a_log, dt_bias, nothing, cu, *caches):
    dq, dv, dg = (in_layout(opts.layout, *x) for x in (q, v, g))
    return dq, dq, dv, in_layout(opts.layout, *v[:3], 1)[:-1], dg, tuple(a_log), tuple(dt_bias)


_SHAPES = {
    "fwd_prepare": (_fwd_prepare_shapes, 13),
    "pre_process_fwd": (_pre_process_fwd_shapes, 0),
    "fwd_h": (_fwd_h_shapes, 3),
    "fwd_finalize": (_fwd_finalize_shapes, 0),
    "bwd_prepare": (_bwd_prepare_shapes, 3),
    "pre_process_bwd": (_pre_process_bwd_shapes, 0),
    "bwd_dhu": (_bwd_dhu_shapes, 3),
    "bwd_finalize": (_bwd_finalize_shapes, 7),
}


class _Stage:
    """The custom operator of one stage and one set of options, with its constant tensors."""

    def __init__(self, stage, opts):
        shapes, count = _SHAPES[stage]
        state = HAS_D_FINAL_STATE if stage in ("bwd_dhu", "pre_process_bwd") else HAS_INITIAL_STATE
        present = HAS_A_LOG * opts.has_a_log + HAS_DT_BIAS * opts.has_dt_bias + state * opts.has_initial_state
        present += HAS_CU_SEQLENS * (opts.cu_seqlens is not None)
        layout = opts.layout
        if stage == "bwd_finalize":  # inputs are head-major, ``layout`` is that of the gradients
            layout, present = "BNSD", present + OUT_TOKEN_MAJOR * (opts.layout in ("BSND", "TND"))
        self.options = pack_options(opts, present, layout=layout)
        self.boundaries = Tensor(np.array(opts.cu_seqlens, np.int32)) if isinstance(opts.cu_seqlens, tuple) else None
        self.nothing = Tensor(np.zeros(1, np.float32))
        self.op = custom(
            f"kcp_{stage}",
            lambda *args: shapes(opts, *args),
            (lambda *args: (F32,) * count) if count else (lambda *args: F32),
            f"{stage} {opts!r}",
        )


@lru_cache(512)
def _cached_stage(stage, opts):
    return _Stage(stage, opts)


@constexpr(check=False)
def _stage(stage, opts):
    s = _cached_stage(stage, opts)
    return s.op, s.options, s.boundaries, s.nothing


def _trim(opts, states, cu):
    """In PyNative the values of a boundary Tensor are known, so that states of chunks that do not exist are dropped."""
    if opts.cu_seqlens != "tensor" or in_graph():
        return states
    bounds = cu.asnumpy()
    return states[:, : int((-(-(bounds[1:] - bounds[:-1]) // opts.chunk_size)).sum())]


def fwd_prepare(opts, q, k, v, g, beta, a_log, dt_bias, cu):
    """The thirteen caches of ``chunk_kda_fwd_prepare``; without the in-kernel norm q_rstd and k_rstd are placeholders."""
    op, options, boundaries, nothing = _stage("fwd_prepare", opts)
    return op(options, q, k, v, g, beta, a_log, dt_bias, nothing, cu if boundaries is None else boundaries)


def pre_process_fwd(opts, k, w, u, gk, cu):
    """``[N, Hv, K, V + K]``, the affine summaries ``[E | M]`` of the local sequences."""
    op, options, boundaries, nothing = _stage("pre_process_fwd", opts)
    return op(options, k, w, u, gk, nothing, cu if boundaries is None else boundaries)


def fwd_h(opts, k, w, u, gk, initial_state, cu):
    """``(h, v_new, final_state)`` of ``chunk_kda_fwd_h``."""
    op, options, boundaries, _ = _stage("fwd_h", opts)
    h, v_new, final_state = op(options, k, w, u, gk, initial_state, cu if boundaries is None else boundaries)
    return _trim(opts, h, cu), v_new, final_state


def fwd_finalize(opts, qg_scaled, aqk, v_new, h, cu):
    """Attention output in ``opts.layout``, float32."""
    op, options, boundaries, _ = _stage("fwd_finalize", opts)
    return op(options, qg_scaled, aqk, v_new, h, cu if boundaries is None else boundaries)


def bwd_prepare(opts, aqk, v_new, d_o, h, cu):
    """``(dAqk, dv_local, dq_raw)`` of ``chunk_kda_bwd_prepare``."""
    op, options, boundaries, _ = _stage("bwd_prepare", opts)
    return op(options, aqk, v_new, d_o, h, cu if boundaries is None else boundaries)


def pre_process_bwd(opts, q, k, w, d_o, dv, gk, cu):
    """``[N, Hv, K, V + K]``, the backward affine summaries ``[dE | dM]`` of the local sequences."""
    op, options, boundaries, nothing = _stage("pre_process_bwd", opts)
    return op(options, q, k, w, d_o, dv, gk, nothing, cu if boundaries is None else boundaries)


def bwd_dhu(opts, q, k, w, d_o, dv, gk, dht, cu):
    """``(dh, dh0, dv_scan)`` of ``chunk_kda_bwd_dhu``; ``opts.has_initial_state`` says whether dht is given."""
    op, options, boundaries, _ = _stage("bwd_dhu", opts)
    dh, dh0, dv_scan = op(options, q, k, w, d_o, dv, gk, dht, cu if boundaries is None else boundaries)
    return _trim(opts, dh, cu), dh0, dv_scan


def bwd_finalize(opts, q, k, v, gk, raw_g, beta, a_log, dt_bias, akk, v_new, h, dh, dv_scan, d_aqk, dq_raw, q_rstd, k_rstd, cu):
    """``(dq, dk, dv, dbeta, dg, dA_log, ddt_bias)`` of ``chunk_kda_bwd_finalize``, token gradients in ``opts.layout``, float32.

    Decays are computed again from raw_g; gk is not read.
    """
    op, options, boundaries, nothing = _stage("bwd_finalize", opts)
    cu = cu if boundaries is None else boundaries
    return op(options, q, k, v, raw_g, beta, a_log, dt_bias, nothing, cu, akk, v_new, h, dh, dv_scan, d_aqk, dq_raw, q_rstd, k_rstd)
