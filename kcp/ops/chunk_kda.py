"""The differentiable op: chunk_kda, Kimi Delta Attention in its chunkwise form (section 4 of the Hyper-Parallel document)."""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import mindspore as ms
from mindspore import Tensor, nn
from mindspore.common._grad_function import _Function
from mindspore.ops import constexpr

from kcp.ops import backends
from kcp.ops.numerics import in_graph
from kcp.ops.options import (
    KdaOptions,
    check_chunk_indices,
    check_cu_seqlens,
    check_flag,
    check_inputs,
    check_tensor,
    describe,
    is_host_boundaries,
    refuse_boundaries,
    require_tensor,
)


class _ChunkKda(nn.Cell):
    """One call of the op with its options fixed: explicit forward and backward, in PyNative and in graphs."""

    def __init__(self, opts: KdaOptions, backend):
        super().__init__(auto_prefix=False)
        self.opts = opts
        self.opts_without_caches = replace(opts, disable_recompute=False)
        self.forward = backend.op_forward
        self.backward = backend.op_backward
        self.direct = getattr(backend, "op_direct", None)

    def construct(self, q, k, v, g, beta, a_log, dt_bias, initial_state, cu):
        out, final_state, saved = self.forward(self.opts, q, k, v, g, beta, a_log, dt_bias, initial_state, cu)
        return (out, final_state) + saved

    def bprop(self, q, k, v, g, beta, a_log, dt_bias, initial_state, cu, out, dout):
        grads = self.backward(self.opts, q, k, v, g, beta, a_log, dt_bias, initial_state, cu, out[2:], dout[0], dout[1])
        return grads + (cu - cu,)


class _ChunkKdaPyNative(_Function):
    """The same call for PyNative. A Cell would have to return its caches as outputs, for which PyNative makes gradients of zeros as large
    as the caches; here they stay in the context, and where no gradient is wanted there are none."""

    @staticmethod
    def forward(ctx, cell, *tensors):
        opts = cell.opts if any(ctx.needs_input_grad) else cell.opts_without_caches
        out, final_state, saved = cell.forward(opts, *tensors)
        ctx.cell = cell
        ctx.save_for_backward(*tensors, *saved)
        ctx.set_materialize_grads(False)
        return out, final_state

    @staticmethod
    def backward(ctx, d_out, d_final):
        saved = ctx.saved_tensors
        cell, tensors = ctx.cell, saved[:9]
        return (None, *cell.backward(cell.opts, *tensors, saved[9:], d_out, d_final), None)


def _run_pynative(cell, tensors, output_final_state):
    results = None if cell.direct is None else cell.direct(cell.opts, *tensors, output_final_state)
    return _ChunkKdaPyNative.apply(cell, *tensors) if results is None else results


@lru_cache(256)
def _cached_cell(opts: KdaOptions, backend) -> _ChunkKda:
    return _ChunkKda(opts, backend)


def resolve_scale(scale, key_width):
    """``scale``, or K^-1/2 for None."""
    return float(key_width) ** -0.5 if scale is None else scale


@constexpr(check=False)
def _cell(tensors, cu, boundaries, scale, chunk_size, layout, flags, numbers, chunk_indices, compiled):
    """Check a call and give its Cell. ``tensors``: ``(shape, dtype)`` or None of q, k, v, g, beta, a_log, dt_bias, initial_state."""
    q, k, v, g, beta, a_log, dt_bias, initial_state = tensors
    safe_gate, use_gate, disable_recompute, v_first, l2norm, beta_sigmoid, neg_eigval, exp2 = flags
    opts = KdaOptions(
        scale=resolve_scale(scale, max(1, q[0][-1] if q[0] else 1)),
        chunk_size=chunk_size,
        layout=layout,
        safe_gate=safe_gate,
        lower_bound=numbers[0],
        use_gate_in_kernel=use_gate,
        has_a_log=a_log is not None,
        has_dt_bias=dt_bias is not None,
        has_initial_state=initial_state is not None,
        disable_recompute=disable_recompute,
        state_v_first=v_first,
        epsilon=numbers[1],
        use_qk_l2norm_in_kernel=l2norm,
        use_beta_sigmoid_in_kernel=beta_sigmoid,
        allow_neg_eigval=neg_eigval,
        use_exp2=exp2,
    )
    num_sequences = None if boundaries is None else check_boundary_info(boundaries)
    if cu is not None:
        num_sequences = len(cu) - 1
    sizes = check_inputs(layout, q, k, v, g, beta, a_log, dt_bias, initial_state, v_first, num_sequences)
    if cu is not None:
        cu = check_cu_seqlens(cu, sizes["T"])
    elif boundaries is not None:
        cu = "tensor"
    check_chunk_indices(chunk_indices, cu, chunk_size)
    object.__setattr__(opts, "cu_seqlens", cu)
    return _cached_cell(opts, backends.select("chunk_kda", compiled))


_PLACEHOLDER = Tensor([0.0], ms.float32)


@constexpr(check=False)
def _placeholder():
    """What stands for an optional tensor that is not given."""
    return _PLACEHOLDER


def check_boundary_info(info):
    """Check ``(shape, dtype)`` of an int32 boundary Tensor ``[N+1]``; returns N."""
    check_tensor("cu_seqlens", info, "N+1", {}, ("Int32",))
    return info[0][0] - 1


def boundaries_of(cu_seqlens):
    """``(host tuple or None, Tensor or None)``."""
    if isinstance(cu_seqlens, Tensor):
        return None, cu_seqlens
    if is_host_boundaries(cu_seqlens):
        return tuple(cu_seqlens), None
    if cu_seqlens is not None:
        refuse_boundaries(cu_seqlens)
    return None, None


def _token_count(x, layout):
    return x.shape[{"BNSD": 2, "BSND": 1, "NTD": 1, "TND": 0}[layout]]


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    chunk_size: int = 64,
    *,
    layout: str = "BNSD",
    output_final_state: bool = False,
    safe_gate: bool = False,
    lower_bound: float = -5.0,
    use_gate_in_kernel: bool = True,
    a_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    cu_seqlens: Sequence[int] | Tensor | None = None,
    chunk_indices: Sequence | None = None,
    initial_state: Tensor | None = None,
    disable_recompute: bool = True,
    state_v_first: bool = False,
    epsilon: float = 1e-6,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    use_exp2: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Kimi Delta Attention over whole sequences, differentiable in every tensor.

    Per value head, with state S ``[K, V]``, natural-log decay a_t <= 0 ``[K]`` and write strength beta_t::

        S <- exp(a_t) * S ;  S <- S + beta_t k_t (v_t - k_t^T S)^T ;  o_t = scale * q_t^T S

    Args:
        q: Queries, float32, float16 or bfloat16, in ``layout``: BNSD ``[B, Hk, T, K]``, BSND ``[B, T, Hk, K]``, NTD ``[Hk, T, K]``,
            TND ``[T, Hk, K]``; K <= 256, T >= 1.
        k: Keys, shape and dtype of q.
        v: Values, ``[B, Hv, T, V]`` in BNSD, dtype of q; V <= 256, Hv a multiple of Hk (q and k serve Hv / Hk value heads each).
        g: Gate, ``[B, Hv, T, K]`` in BNSD: raw gate with ``use_gate_in_kernel``, else the natural-log decay a itself.
        beta: Write strength ``[B, Hv, T]`` in BNSD, raw with ``use_beta_sigmoid_in_kernel``.
        scale: Factor of the scores; None means K^-1/2.
        chunk_size: Tokens a chunk: 16, 32 or 64. Changes speed and rounding, not the result.
        layout: ``"BNSD"``, ``"BSND"``, ``"NTD"`` or ``"TND"``.
        output_final_state: Return the state after the last token of every sequence.
        safe_gate: a = lower_bound * sigmoid(exp(a_log) (g + dt_bias)); otherwise a = -exp(a_log) softplus(g + dt_bias).
        lower_bound: In [-5, 0), for ``safe_gate``.
        use_gate_in_kernel: Turn the raw gate into decays here.
        a_log: ``[Hv]`` float32; required by the softplus gate, optional (1 in place of exp(a_log)) with ``safe_gate``.
        dt_bias: ``[Hv, K]`` or ``[Hv*K]`` float32, optional.
        cu_seqlens: Boundaries of packed sequences (B = 1): host integers from 0 to T, or an int32 Tensor ``[N+1]`` padded with T, for
            which a new packing does not recompile a graph. Sequences may have one token or none.
        chunk_indices: Derived metadata of the Hyper-Parallel interface; checked against host ``cu_seqlens`` if given.
        initial_state: ``[N, Hv, K, V]`` float32 (``[N, Hv, V, K]`` with ``state_v_first``), N = B or the number of sequences.
        disable_recompute: True saves caches for the backward, False recomputes them; the results are equal.
        state_v_first: States have their value axis before their key axis.
        epsilon: In rstd = 1 / sqrt(sum x^2 + epsilon) of the in-kernel norm.
        use_qk_l2norm_in_kernel: L2-normalise q and k here.
        use_beta_sigmoid_in_kernel: beta <- sigmoid(beta).
        allow_neg_eigval: beta <- 2 sigmoid(beta); only with ``use_beta_sigmoid_in_kernel``.
        use_exp2: Keep decays as powers of two; both settings give equal results.

    Returns:
        ``(out, final_state)``: out token-major, ``[B, T, Hv, V]`` (``[T, Hv, V]`` for NTD and TND), dtype of v; final_state float32,
        shape of ``initial_state``, or None without ``output_final_state``. Both may take part in the loss.

    Raises:
        ValueError, TypeError: naming the argument, what it got and what is allowed.

    Source: KDA paper, chunkwise form; sections 4.1-4.3 of the Hyper-Parallel document (names without ``npu_``).
    """
    require_tensor("q", q)
    require_tensor("k", k)
    require_tensor("v", v)
    require_tensor("g", g)
    require_tensor("beta", beta)
    require_tensor("a_log", a_log, True)
    require_tensor("dt_bias", dt_bias, True)
    require_tensor("initial_state", initial_state, True)
    check_flag("output_final_state", output_final_state)
    host, boundaries = boundaries_of(cu_seqlens)
    cell = _cell(
        (describe(q), describe(k), describe(v), describe(g), describe(beta), describe(a_log), describe(dt_bias), describe(initial_state)),
        host,
        describe(boundaries),
        scale,
        chunk_size,
        layout,
        (safe_gate, use_gate_in_kernel, disable_recompute, state_v_first, use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel,
         allow_neg_eigval, use_exp2),
        (lower_bound, epsilon),
        chunk_indices,
        in_graph(),
    )  # fmt: skip
    if boundaries is not None and not in_graph():
        check_cu_seqlens(boundaries.asnumpy().tolist(), _token_count(q, layout))
    none = _placeholder()
    tensors = (
        q, k, v, g, beta,
        none if a_log is None else a_log,
        none if dt_bias is None else dt_bias,
        none if initial_state is None else initial_state,
        none if boundaries is None else boundaries,
    )  # fmt: skip
    results = cell(*tensors) if in_graph() else _run_pynative(cell, tensors, output_final_state)
    return results[0], results[1] if output_final_state else None
