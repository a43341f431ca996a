"""The fused operators on the native kernels: forward, backward, affine summary and state gradient, each over a range of value heads.

Tensors are in the layouts of the op, float32, float16 or bfloat16, as they are; absent optional inputs are one-element placeholders.
``heads = (first, last)`` computes value heads first..last-1 of full inputs; outputs, states and caches then hold those heads only, and the
range must consist of whole groups of Hv / Hk heads. ``(0, 0)`` means all heads. :func:`op_forward_into` and :func:`op_backward_into` write
the token results of a range into tensors of all heads, in PyNative: no slice of an input and no copy of a result is made.
"""

from functools import lru_cache

import mindspore as ms
import numpy as np
from mindspore import Tensor, ops
from mindspore.ops import constexpr

from kcp.ops.backends.native_call import (
    HAS_A_LOG,
    HAS_CACHE,
    HAS_CU_SEQLENS,
    HAS_D_FINAL_STATE,
    HAS_DT_BIAS,
    HAS_INITIAL_STATE,
    WANT_FINAL_STATE,
    WANT_M,
    custom,
    in_layout,
    pack_options,
    sizes,
)

LONGEST_CHUNK = 64  # row length of the saved Aqk and Akk
LANE = 32
CACHE_HEADER = 32
SEGMENT = 32  # chunks that a recomputing backward treats at once, kSegment in native/problem.h


def _padded(width):
    return -(-width // LANE) * LANE


class _Operators:
    """The custom operators and constant tensors of one set of options and heads."""

    def __init__(self, opts, heads):
        self.opts, self.heads = opts, heads
        present = HAS_A_LOG * opts.has_a_log + HAS_DT_BIAS * opts.has_dt_bias + HAS_CU_SEQLENS * (opts.cu_seqlens is not None)
        initial = present + HAS_INITIAL_STATE * opts.has_initial_state
        cache = HAS_CACHE * opts.disable_recompute

        def pack(flags):
            return pack_options(opts, flags, heads)

        self.boundaries = Tensor(np.array(opts.cu_seqlens, np.int32)) if isinstance(opts.cu_seqlens, tuple) else None
        self.nothing = Tensor(np.zeros(1, np.float32))
        self.forward_options = pack(initial + WANT_FINAL_STATE + cache)
        self.backward_options = pack(initial + HAS_D_FINAL_STATE + cache), pack(initial + cache)
        self.summary_options = pack(initial), pack(initial + WANT_M)
        self.gradient_options = pack(present + cache), pack(present + HAS_D_FINAL_STATE + cache)
        key = f"{opts!r} {heads}"
        self.forward = custom("kcp_forward", self._forward_shapes, self._forward_dtypes, key)
        self.backward = custom("kcp_backward", self._backward_shapes, self._backward_dtypes, key)
        self.summary = tuple(
            custom("kcp_summary", shapes, lambda *args: ms.float32, f"{key} {shapes.__name__}")
            for shapes in (self._increment_shape, self._summary_shape)
        )
        self.state_gradient = custom("kcp_backward_summary", self._state_shape, lambda *args: ms.float32, key)
        # the token results among the inputs: the entry points see the same list of tensors
        float32 = (ms.float32,) * 3
        self.forward_into = custom("kcp_forward", self._forward_into_shapes, lambda *args: float32[:2], f"{key} into")
        self.backward_into = custom("kcp_backward", self._backward_into_shapes, lambda *args: float32, f"{key} into")

    def _sizes(self, k, v, cu):
        """``(N, B, T, heads of the range, key heads of the range, K, V)``."""
        batch, tokens, heads, key, value = sizes(self.opts.layout, k, v)
        _, _, key_heads, _, _ = sizes(self.opts.layout, k, k)
        group = heads // key_heads
        if self.heads[1]:
            heads = self.heads[1] - self.heads[0]
        return batch if self.opts.cu_seqlens is None else cu[0] - 1, batch, tokens, heads, heads // group, key, value

    def _cache_size(self, num_sequences, batch, tokens, heads, key, value):
        """Floats of what the forward keeps: h, v_new, Aqk and Akk of every chunk and head; to recompute, the states between segments."""
        cu, chunk = self.opts.cu_seqlens, self.opts.chunk_size
        if not self.opts.disable_recompute:
            return max(1, batch * tokens // (SEGMENT * chunk) * heads * key * value)
        if isinstance(cu, tuple):
            chunks = sum(-(-(e - b) // chunk) for b, e in zip(cu[:-1], cu[1:], strict=True))
        elif cu == "tensor":
            chunks = min((tokens + num_sequences * (chunk - 1)) // chunk, tokens)
        else:
            chunks = batch * -(-tokens // chunk)
        return chunks * heads * (_padded(key) * _padded(value) + chunk * (_padded(value) + 2 * LONGEST_CHUNK)) + CACHE_HEADER

    def _forward_shapes(self, options, q, k, v, g, beta, a_log, dt_bias, initial_state, cu):
        count, batch, tokens, heads, _, key, value = self._sizes(k, v, cu)
        state = (value, key) if self.opts.state_v_first else (key, value)
        cache = self._cache_size(count, batch, tokens, heads, key, value)
        return _token_major(v, batch, heads, tokens, value), (count, heads, *state), (cache,)

    def _forward_dtypes(self, options, q, k, v, *rest):
        return v, ms.float32, ms.float32

    def _backward_shapes(self, options, q, k, v, g, beta, a_log, dt_bias, initial_state, cu, d_out, d_final, cache):
        if not self.heads[1]:
            return q, k, v, g, beta, a_log, dt_bias, initial_state
        _, batch, tokens, heads, key_heads, key, value = self._sizes(k, v, cu)
        dq, dv, dg = (in_layout(self.opts.layout, batch, h, tokens, w) for h, w in ((key_heads, key), (heads, value), (heads, key)))
        da_log = (heads,) if self.opts.has_a_log else tuple(a_log)
        ddt_bias = (heads, key) if self.opts.has_dt_bias else tuple(dt_bias)
        return dq, dq, dv, dg, dg[:-1], da_log, ddt_bias, tuple(initial_state)

    def _backward_dtypes(self, options, q, k, v, g, beta, *rest):
        return q, k, v, g, beta, ms.float32, ms.float32, ms.float32

    def _forward_into_shapes(self, *args):
        return self._forward_shapes(*args[:-1])[1:]

    def _backward_into_shapes(self, options, q, k, v, g, beta, a_log, dt_bias, initial_state, cu, *rest):
        _, _, _, heads, _, key, _ = self._sizes(k, v, cu)
        return (heads,) if self.opts.has_a_log else (1,), (heads, key) if self.opts.has_dt_bias else (1,), tuple(initial_state)

    def _increment_shape(self, options, q, k, v, g, beta, a_log, dt_bias, initial_state, cu):
        count, _, _, heads, _, key, value = self._sizes(k, v, cu)
        return count, heads, key, value

    def _summary_shape(self, *args):
        count, heads, key, value = self._increment_shape(*args)
        return count, heads, key, value + key

    def _state_shape(self, options, q, k, v, g, beta, a_log, dt_bias, d_final, cu, d_out, cache):
        count, _, _, heads, _, key, value = self._sizes(k, v, cu)
        return (count, heads, value, key) if self.opts.state_v_first else (count, heads, key, value)


def _token_major(v, batch, heads, tokens, value):
    return in_layout("TND" if len(v) == 3 else "BSND", batch, heads, tokens, value)


@lru_cache(256)
def _cached_operators(opts, heads):
    return _Operators(opts, heads)


@constexpr(check=False)
def _forward(opts, heads):
    o = _cached_operators(opts, heads)
    return o.forward, o.forward_options, o.boundaries


@constexpr(check=False)
def _backward(opts, heads, has_d_final):
    o = _cached_operators(opts, heads)
    return o.backward, o.backward_options[0 if has_d_final else 1], o.boundaries, o.nothing


def op_forward_into(out, opts, q, k, v, g, beta, a_log, dt_bias, initial_state, cu, heads):
    """:func:`op_forward` of a range of heads, written into ``out``, which has all heads (PyNative).

    Returns:
        ``(final_state, saved)`` of the range.
    """
    o = _cached_operators(opts, heads)
    cu = cu if o.boundaries is None else o.boundaries
    final_state, cache = o.forward_into(o.forward_options, q, k, v, g, beta, a_log, dt_bias, initial_state, cu, out)
    return final_state, (cache,)


def op_backward_into(grads, opts, q, k, v, g, beta, a_log, dt_bias, initial_state, cu, saved, d_out, d_final, heads):
    """:func:`op_backward` of a range of heads, dq, dk, dv, dg, dbeta written into ``grads``, which have all heads (PyNative).

    Returns:
        ``(da_log, ddt_bias, dh0)`` of the range; one zero for a placeholder.
    """
    o = _cached_operators(opts, heads)
    cu = cu if o.boundaries is None else o.boundaries
    return o.backward_into(o.backward_options[0], q, k, v, g, beta, a_log, dt_bias, initial_state, cu, d_out, d_final, saved[0], *grads)


@constexpr(check=False)
def _summary(opts, heads, with_transition):
    o = _cached_operators(opts, heads)
    return o.summary[with_transition], o.summary_options[with_transition], o.boundaries


@constexpr(check=False)
def _state_gradient(opts, heads, has_d_final):
    o = _cached_operators(opts, heads)
    return o.state_gradient, o.gradient_options[has_d_final], o.boundaries, o.nothing


@constexpr
def _out_shape(layout, v):
    batch, tokens, heads, _, value = sizes(layout, v, v)
    return _token_major(v, batch, heads, tokens, value)


def op_forward(opts, q, k, v, g, beta, a_log, dt_bias, initial_state, cu, heads=(0, 0)):
    """Forward of ``chunk_kda``; absent optional inputs are placeholders (``opts.has_*``).

    Returns:
        ``(out, final_state, saved)``: out token-major in v's dtype, final_state float32, saved what
        :func:`op_backward` needs: a cache, or, when it is to recompute that, the states between its segments.
    """
    op, options, boundaries = _forward(opts, heads)
    cu = cu if boundaries is None else boundaries
    out, final_state, cache = op(options, q, k, v, g, beta, a_log, dt_bias, initial_state, cu)
    return out, final_state, (cache,)


def op_backward(opts, q, k, v, g, beta, a_log, dt_bias, initial_state, cu, saved, d_out, d_final, heads=(0, 0)):
    """Backward of ``chunk_kda``; ``d_out`` or ``d_final`` may be None (no gradient arrives). d_out holds all heads.

    Returns:
        ``(dq, dk, dv, dg, dbeta, da_log, ddt_bias, dh0)`` in the layout, shape and dtype of the inputs; zeros for placeholders.
    """
    op, options, boundaries, nothing = _backward(opts, heads, d_final is not None)
    cu = cu if boundaries is None else boundaries
    if d_out is None:
        d_out = ops.zeros(_out_shape(opts.layout, v.shape), v.dtype)
    d_final = nothing if d_final is None else d_final
    return op(options, q, k, v, g, beta, a_log, dt_bias, initial_state, cu, d_out, d_final, saved[0])


def op_summary(opts, q, k, v, g, beta, a_log, dt_bias, initial_state, cu, with_transition=True, heads=(0, 0)):
    """Affine summary of every sequence, final state = M initial state + E, in one pass that stores no caches.

    Returns:
        ``[N, Hv, K, V + K]`` float32, last axis ``[E | M]``; without the transition E alone ``[N, Hv, K, V]``, which then includes
        M times ``initial_state`` if there is one. Always K-first.
    """
    op, options, boundaries = _summary(opts, heads, with_transition)
    return op(options, q, k, v, g, beta, a_log, dt_bias, initial_state, cu if boundaries is None else boundaries)


def op_state_gradient(opts, q, k, v, g, beta, a_log, dt_bias, cu, saved, d_out, d_final, heads=(0, 0)):
    """Gradient that reaches the initial state of every sequence (dE of the backward summary): the dh recurrence alone.

    Args:
        saved: what :func:`op_forward` kept; not read when its options recompute.
        d_final: gradient of the final states ``[N, Hv, K, V]``, or None for zeros.

    Returns:
        ``[N, Hv, K, V]`` float32, V-first with ``state_v_first``.
    """
    op, options, boundaries, nothing = _state_gradient(opts, heads, d_final is not None)
    cache = saved[0] if opts.disable_recompute else nothing
    d_final = nothing if d_final is None else d_final
    return op(options, q, k, v, g, beta, a_log, dt_bias, d_final, cu if boundaries is None else boundaries, d_out, cache)
