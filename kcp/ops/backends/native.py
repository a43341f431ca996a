"""The native backend: fused C++ kernels for CPUs (``native/*.cc``), called as MindSpore "aot" custom operators.

Every entry point takes its tensors in the layouts of ``docs/ops.md`` as they are, float32, float16 or bfloat16, and an int64 tensor of
options (:func:`pack_options`); absent optional inputs are one-element placeholders. Arithmetic, states and caches are float32.
"""

from functools import lru_cache

import mindspore as ms
import numpy as np
from mindspore import Tensor, ops
from mindspore.ops import constexpr

from kcp.ops.backends.composite import merge_fwd_bwd
from kcp.ops.backends.native_call import (
    HAS_A_LOG,
    HAS_CACHE,
    HAS_CU_SEQLENS,
    HAS_D_FINAL_STATE,
    HAS_DT_BIAS,
    HAS_INITIAL_STATE,
    LIBRARY,
    WANT_FINAL_STATE,
    custom,
    in_layout,
    pack_options,
    sizes,
)
from kcp.ops.backends.native_stages import (
    bwd_dhu,
    bwd_finalize,
    bwd_prepare,
    fwd_finalize,
    fwd_h,
    fwd_prepare,
    pre_process_bwd,
    pre_process_fwd,
)

CHUNK = 64
LANE = 32
CACHE_HEADER = 32

__all__ = [
    "bwd_dhu",
    "bwd_finalize",
    "bwd_prepare",
    "fwd_finalize",
    "fwd_h",
    "fwd_prepare",
    "merge_fwd_bwd",
    "op_backward",
    "op_forward",
    "pre_process_bwd",
    "pre_process_fwd",
    "unavailable",
]


def unavailable(stage: str) -> str | None:
    """Why ``stage`` (or ``"chunk_kda"``) can't be served here; None: it can."""
    if ms.get_context("device_target") != "CPU":
        return f"it serves CPUs, and the device target is {ms.get_context('device_target')}"
    if not LIBRARY.exists():
        return "the native kernels are not built; install kcp where a C++ compiler (g++) is found"
    return None


def _padded(width):
    return -(-width // LANE) * LANE


def _cache_size(opts, num_sequences, batch, tokens, heads, key, value):
    """Floats of the forward's cache: h, v_new, Aqk and Akk of every chunk and head."""
    if isinstance(opts.cu_seqlens, tuple):
        chunks = sum(-(-(e - b) // CHUNK) for b, e in zip(opts.cu_seqlens[:-1], opts.cu_seqlens[1:], strict=True))
    elif opts.cu_seqlens == "tensor":
        chunks = min((tokens + num_sequences * (CHUNK - 1)) // CHUNK, tokens)
    else:
        chunks = batch * -(-tokens // CHUNK)
    return chunks * heads * (_padded(key) * _padded(value) + CHUNK * _padded(value) + 2 * CHUNK * CHUNK) + CACHE_HEADER


class _Operators:
    """The custom operators and constant tensors of one set of options."""

    def __init__(self, opts):
        self.opts = opts
        self.present = (
            HAS_A_LOG * opts.has_a_log
            + HAS_DT_BIAS * opts.has_dt_bias
            + HAS_INITIAL_STATE * opts.has_initial_state
            + HAS_CU_SEQLENS * (opts.cu_seqlens is not None)
        )
        cache = HAS_CACHE * opts.disable_recompute
        self.forward_options = pack_options(opts, self.present + WANT_FINAL_STATE + cache)
        self.backward_options = pack_options(opts, self.present + HAS_D_FINAL_STATE + cache)
        self.backward_options_no_state = pack_options(opts, self.present + cache)
        self.boundaries = Tensor(np.array(opts.cu_seqlens, np.int32)) if isinstance(opts.cu_seqlens, tuple) else None
        self.nothing = Tensor(np.zeros(1, np.float32))
        self.forward = custom("kcp_forward", self._forward_shapes, self._forward_dtypes, repr(opts))
        self.backward = custom("kcp_backward", self._backward_shapes, self._backward_dtypes, repr(opts))

    def _forward_shapes(self, options, q, k, v, g, beta, a_log, dt_bias, initial_state, cu):
        batch, tokens, heads, key, value = sizes(self.opts.layout, k, v)
        num_sequences = batch if self.opts.cu_seqlens is None else cu[0] - 1
        out = (tokens, heads, value) if len(v) == 3 else (batch, tokens, heads, value)
        state = (value, key) if self.opts.state_v_first else (key, value)
        cache = _cache_size(self.opts, num_sequences, batch, tokens, heads, key, value) if self.opts.disable_recompute else 1
        return out, (num_sequences, heads, *state), (cache,)

    def _forward_dtypes(self, options, q, k, v, *rest):
        return v, ms.float32, ms.float32

    def _backward_shapes(self, options, q, k, v, g, beta, a_log, dt_bias, initial_state, cu, d_out, d_final, cache):
        return q, k, v, g, beta, a_log, dt_bias, initial_state

    def _backward_dtypes(self, options, q, k, v, g, beta, *rest):
        return q, k, v, g, beta, ms.float32, ms.float32, ms.float32


@lru_cache(256)
def _cached_operators(opts):
    return _Operators(opts)


@constexpr(check=False)
def _operators(opts):
    o = _cached_operators(opts)
    return o.forward, o.backward, o.forward_options, o.backward_options, o.backward_options_no_state, o.boundaries, o.nothing


def op_forward(opts, q, k, v, g, beta, a_log, dt_bias, initial_state, cu):
    """Forward of ``chunk_kda``; absent optional inputs are placeholders (``opts.has_*``).

    Returns:
        ``(out, final_state, saved)``: out token-major in v's dtype, final_state float32, saved a tuple of caches for
        :func:`op_backward` (empty when the backward is to recompute them).
    """
    forward, _, options, _, _, boundaries, _ = _operators(opts)
    if boundaries is not None:
        cu = boundaries
    out, final_state, cache = forward(options, q, k, v, g, beta, a_log, dt_bias, initial_state, cu)
    return out, final_state, (cache,) if opts.disable_recompute else ()


def op_backward(opts, q, k, v, g, beta, a_log, dt_bias, initial_state, cu, saved, d_out, d_final):
    """Backward of ``chunk_kda``; ``d_out`` or ``d_final`` may be None (no gradient arrives).

    Returns:
        ``(dq, dk, dv, dg, dbeta, da_log, ddt_bias, dh0)`` in the layout, shape and dtype of the inputs; zeros for placeholders.
    """
    _, backward, _, options, options_no_state, boundaries, nothing = _operators(opts)
    if boundaries is not None:
        cu = boundaries
    if d_out is None:
        d_out = ops.zeros(_out_shape(opts.layout, v.shape), v.dtype)
    if d_final is None:
        options, d_final = options_no_state, nothing
    cache = saved[0] if opts.disable_recompute else nothing
    return backward(options, q, k, v, g, beta, a_log, dt_bias, initial_state, cu, d_out, d_final, cache)


@constexpr
def _out_shape(layout, v):
    batch, tokens, heads, _, value = sizes(layout, v, v)
    return in_layout("TND" if len(v) == 3 else "BSND", batch, heads, tokens, value)
