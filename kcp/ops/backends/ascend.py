"""The Ascend backend: Hyper-Parallel's ``npu_chunk_kda*`` functions (FLA-NPU kernels) behind kcp's stages.

``ascend_symbols`` finds and calls the functions, ``ascend_layout`` converts conventions, ``ascend_routing`` holds limits and routes,
``ascend_stages`` the nine stages, ``ascend_chain`` the op as a chain of them, ``ascend_correction`` the final-state correction. Works
without Hyper-Parallel installed: every stage is then unavailable, and says what to install. docs/ascend.md has the whole picture.
"""

import contextlib
from collections.abc import Iterator

import mindspore as ms
from mindspore import Tensor, ops
from mindspore.graph.api import _pynative_executor
from mindspore.ops import GradOperation

from kcp.ops.backends import ascend_chain as chain
from kcp.ops.backends import ascend_routing as routing
from kcp.ops.backends.ascend_correction import use as use_correction
from kcp.ops.backends.ascend_layout import Packing, f32, four_axes, with_batch, without_batch
from kcp.ops.backends.ascend_symbols import Refused, find, version
from kcp.ops.options import KdaOptions

COMPILES = False  # Hyper-Parallel's functions are Python around custom operators that graphs can't hold
DEVICES = ("Ascend",)
CHAIN = ("fwd_prepare", "fwd_h", "fwd_finalize", "bwd_prepare", "bwd_dhu", "bwd_finalize")

_MERGE = KdaOptions(1.0, safe_gate=True)  # K-first states
_announced: list[str] = []

__all__ = [
    "bwd_dhu",
    "bwd_finalize",
    "bwd_prepare",
    "fwd_finalize",
    "fwd_h",
    "fwd_prepare",
    "merge_fwd_bwd",
    "op_backward",
    "op_direct",
    "op_forward",
    "op_stateless_forward",
    "pre_process_bwd",
    "pre_process_fwd",
    "prefix",
    "suffix",
    "unavailable",
    "use_correction",
]


def unavailable(stage: str) -> str | None:
    """Why ``stage`` (or ``"chunk_kda"``) can't be served here; None: it can.

    The op needs its own symbol, or one of the chain's: what is missing of the chain is completed by another backend.
    """
    device = ms.get_context("device_target")
    if device not in DEVICES:
        return f"it serves {' and '.join(DEVICES)}, and the device target is {device}"
    if ms.get_context("mode") == ms.GRAPH_MODE:
        return "it serves PyNative, and the execution mode is graph (context.mode 0)"
    found = find(stage)
    if not isinstance(found, str):
        return None
    if stage == "chunk_kda" and any(not isinstance(find(s), str) for s in CHAIN):
        return None
    return found


def describe() -> list[tuple[str, str]]:
    """``(stage, "npu_..." or why that is not there)`` for the op and the nine stages."""
    stages = ("chunk_kda", *CHAIN[:1], "pre_process_fwd", *CHAIN[1:4], "pre_process_bwd", *CHAIN[4:], "merge_fwd_bwd")
    return [(s, symbol if isinstance(symbol := find(s), str) else symbol.name) for s in stages]


def _announce() -> None:
    """One line a process: which stage is served by what."""
    if _announced:
        return
    rows = describe()
    served = [stage for stage, what in rows if what.startswith("npu_")]
    others = [f"{stage} ({what})" for stage, what in rows if not what.startswith("npu_")]
    text = f"Hyper-Parallel {version()} serves {', '.join(served) or 'nothing'}"
    _announced.append(text + (f"; completed by the next backend: {'; '.join(others)}" if others else ""))
    chain.LOG.warning("kcp: ascend backend: %s", _announced[0])


def _traits(opts, q, v, wants_final_state: bool = False, opened: bool = False) -> routing.Traits:
    return routing.Traits(
        key_width=q.shape[-1], value_width=v.shape[-1], dtype=str(v.dtype), chunk_size=opts.chunk_size, safe_gate=opts.safe_gate,
        use_gate_in_kernel=opts.use_gate_in_kernel, disable_recompute=opts.disable_recompute, state_v_first=opts.state_v_first,
        has_initial_state=opts.has_initial_state, wants_final_state=wants_final_state, opened=opened,
    )  # fmt: skip


def _other(opts, q, v):
    """The backend that serves the whole op where its sizes or types are not for the kernels, else None."""
    _announce()
    limit = routing.op_limit(_traits(opts, q, v))
    return None if limit is None else chain.other_backend("chunk_kda", limit)


# ---- the whole op


def _fused(opts, q, k, v, g, beta, a_log, dt_bias, cu):
    """``npu_chunk_kda`` with Hyper-Parallel's own gradient: ``(out, None)``."""
    symbol = find("chunk_kda")
    if isinstance(symbol, str):
        raise Refused(symbol)
    q, k, v, g, beta = (with_batch(x, opts.layout) for x in (q, k, v, g, beta))
    out, _ = symbol(
        q=q, k=k, v=v, g=g, beta=beta, scale=opts.scale, chunk_size=opts.chunk_size, layout=four_axes(opts.layout),
        output_final_state=False, safe_gate=opts.safe_gate, lower_bound=opts.lower_bound, use_gate_in_kernel=opts.use_gate_in_kernel,
        a_log=a_log if opts.has_a_log else None, dt_bias=dt_bias.reshape((-1,)) if opts.has_dt_bias else None, disable_recompute=True,
        epsilon=opts.epsilon, use_qk_l2norm_in_kernel=opts.use_qk_l2norm_in_kernel,
        use_beta_sigmoid_in_kernel=opts.use_beta_sigmoid_in_kernel, allow_neg_eigval=opts.allow_neg_eigval, use_exp2=True,
        **Packing.of(opts, cu, v.shape[0]).arguments(),
    )  # fmt: skip
    return without_batch(out, opts.layout), None


def op_direct(opts, q, k, v, g, beta, a_log, dt_bias, initial_state, cu, output_final_state):
    """The differentiable op where the route is the fused one, else None (PyNative; see :mod:`kcp.ops.chunk_kda`)."""
    _announce()
    if routing.route(_traits(opts, q, v, output_final_state)).kind != routing.FUSED:
        return None
    try:
        return _fused(opts, q, k, v, g, beta, a_log, dt_bias, cu)
    except Refused as limit:
        chain.say_once("chunk_kda", "the chain of stages", str(limit))
        return None


def op_forward(opts, q, k, v, g, beta, a_log, dt_bias, initial_state, cu):
    """Forward of ``chunk_kda`` by the chain: ``(out, final_state, saved)``, see the composite backend."""
    other = _other(opts, q, v)
    if other is not None:
        return other.op_forward(opts, q, k, v, g, beta, a_log, dt_bias, initial_state, cu)
    caches = chain.forward_open(opts, q, k, v, g, beta, a_log, dt_bias, cu)
    return chain.forward_close(opts, v, initial_state, cu, caches)


def op_stateless_forward(opts, q, k, v, g, beta, a_log, dt_bias, initial_state, cu):
    """:func:`op_forward` where nobody reads the final state, by the route; the fused op saves nothing here and gives no final state."""
    if _other(opts, q, v) is None and routing.route(_traits(opts, q, v)).kind == routing.FUSED:
        try:
            out, _ = _fused(opts, q, k, v, g, beta, a_log, dt_bias, cu)
            return out, ops.zeros((1,), ms.float32), ()
        except Refused as limit:
            chain.say_once("chunk_kda", "the chain of stages", str(limit))
    return op_forward(opts, q, k, v, g, beta, a_log, dt_bias, initial_state, cu)


def op_backward(opts, q, k, v, g, beta, a_log, dt_bias, initial_state, cu, saved, d_out, d_final):
    """Backward of ``chunk_kda``: the eight gradients. After the fused forward, whose caches are its own, that forward runs once more."""
    other = _other(opts, q, v)
    if other is not None:
        return other.op_backward(opts, q, k, v, g, beta, a_log, dt_bias, initial_state, cu, saved, d_out, d_final)
    if not saved and routing.route(_traits(opts, q, v)).kind == routing.FUSED:
        return _fused_backward(opts, q, k, v, g, beta, a_log, dt_bias, initial_state, cu, d_out)
    saved, opened = chain.backward_open(opts, q, k, v, g, beta, a_log, dt_bias, initial_state, cu, saved, d_out)
    return chain.backward_close(opts, q, k, v, g, beta, a_log, dt_bias, initial_state, cu, saved, opened, d_final)


@contextlib.contextmanager
def _gradients_on() -> Iterator[None]:
    """Gradients can be taken inside: a backward may itself run where they are off."""
    before = _pynative_executor.enable_grad()
    _pynative_executor.set_enable_grad(True)
    try:
        yield
    finally:
        _pynative_executor.set_enable_grad(before)


def _fused_backward(opts, q, k, v, g, beta, a_log, dt_bias, initial_state, cu, d_out):
    def out(q, k, v, g, beta, a_log, dt_bias):
        return _fused(opts, q, k, v, g, beta, a_log, dt_bias, cu)[0]

    if d_out is None:
        d_out = ops.zeros(out(q, k, v, g, beta, a_log, dt_bias).shape, v.dtype)
    with _gradients_on():
        grads = GradOperation(get_all=True, sens_param=True)(out)(q, k, v, g, beta, a_log, dt_bias, ops.cast(d_out, v.dtype))
    return *grads, initial_state - initial_state


# ---- the op opened at its state exchange: every half carries who serves it


def forward_open(opts, q, k, v, g, beta, a_log, dt_bias, cu):
    """``(another backend or None, what that or the chain opened)``."""
    other = _other(opts, q, v)
    return other, (chain if other is None else other).forward_open(opts, q, k, v, g, beta, a_log, dt_bias, cu)


def forward_summary(opts, q, k, v, g, beta, a_log, dt_bias, cu, opened):
    """Summaries ``[N, Hv, K, V + K]`` = ``[E | M]`` of the local sequences."""
    other, inner = opened
    if other is not None:
        return other.forward_summary(opts, q, k, v, g, beta, a_log, dt_bias, cu, inner)
    return chain.forward_summary(opts, cu, inner)


def forward_end(opts, q, k, v, g, beta, a_log, dt_bias, initial_state, cu, opened):
    """Outgoing states ``[N, Hv, K, V]`` of the local sequences for known incoming ones."""
    other, inner = opened
    if other is not None:
        return other.forward_end(opts, q, k, v, g, beta, a_log, dt_bias, initial_state, cu, inner)
    return chain.forward_end(opts, initial_state, cu, inner)


def forward_close(opts, q, k, v, g, beta, a_log, dt_bias, initial_state, cu, opened):
    """The rest of the forward from its initial states."""
    other, inner = opened
    if other is not None:
        return other.forward_close(opts, q, k, v, g, beta, a_log, dt_bias, initial_state, cu, inner)
    return chain.forward_close(opts, v, initial_state, cu, inner)


def backward_open(opts, q, k, v, g, beta, a_log, dt_bias, initial_state, cu, saved, d_out):
    """``(saved, (another backend or None, what was opened))``."""
    other = _other(opts, q, v)
    module = chain if other is None else other
    saved, inner = module.backward_open(opts, q, k, v, g, beta, a_log, dt_bias, initial_state, cu, saved, d_out)
    return saved, (other, inner)


def backward_summary(opts, q, cu, saved, opened):
    """Backward summaries ``[N, Hv, K, V + K]`` = ``[dE | dM]`` of the local sequences."""
    other, inner = opened
    if other is not None:
        return other.backward_summary(opts, q, cu, saved, inner)
    return chain.backward_summary(opts, cu, saved, inner)


def backward_end(opts, q, cu, saved, opened, d_final):
    """Gradients ``[N, Hv, K, V]`` that leave towards earlier tokens for known final-state gradients."""
    other, inner = opened
    if other is not None:
        return other.backward_end(opts, q, cu, saved, inner, d_final)
    return chain.backward_end(opts, cu, saved, inner, d_final)


def backward_close(opts, q, k, v, g, beta, a_log, dt_bias, initial_state, cu, saved, opened, d_final):
    """The rest of the backward from the final states' gradients."""
    other, inner = opened
    module = chain if other is None else other
    return module.backward_close(opts, q, k, v, g, beta, a_log, dt_bias, initial_state, cu, saved, inner, d_final)


def prefix(summaries: Tensor, rank: int, initial_state: Tensor) -> Tensor:
    """:func:`kcp.parallel.summary.prefix` on the merge kernel, which starts from zero.

    An initial state must have been folded into the first rank's summary (E = M S_0 + E); ``initial_state`` gives the shape alone.
    """
    return merge_fwd_bwd(_MERGE, summaries, tuple(range(rank)))


def suffix(d_e: Tensor, d_m: Tensor, rank: int, d_final: Tensor) -> Tensor:
    """:func:`kcp.parallel.summary.suffix` on the merge kernel; the final state's gradient is folded into the last rank's dE."""
    if rank + 1 == d_e.shape[0]:
        return ops.zeros(d_e.shape[1:], ms.float32)
    return merge_fwd_bwd(_MERGE, ops.concat((f32(d_e), f32(d_m)), -1), tuple(range(d_e.shape[0] - 1, rank, -1)))


# ---- the explicit stages: float32 caches in and out, as for every backend


def _public(stage: str, opts, *tensors):
    _announce()
    results = chain.run(stage, opts, *tensors)
    if isinstance(results, (tuple, list)):
        return tuple(ops.cast(x, ms.float32) for x in results)
    return ops.cast(results, ms.float32)


def fwd_prepare(opts, q, k, v, g, beta, a_log, dt_bias, cu):
    """The thirteen caches of ``chunk_kda_fwd_prepare``."""
    return _public("fwd_prepare", opts, q, k, v, g, beta, a_log, dt_bias, cu)


def pre_process_fwd(opts, k, w, u, gk, cu):
    """``[N, Hv, K, V + K]``, the affine summaries ``[E | M]`` of the local sequences."""
    return _public("pre_process_fwd", opts, k, w, u, gk, cu)


def fwd_h(opts, k, w, u, gk, initial_state, cu):
    """``(h, v_new, final_state)`` of ``chunk_kda_fwd_h``."""
    return _public("fwd_h", opts, k, w, u, gk, initial_state, cu)


def fwd_finalize(opts, qg_scaled, aqk, v_new, h, cu):
    """Attention output in ``opts.layout``, float32 (of bfloat16 values)."""
    return _public("fwd_finalize", opts, qg_scaled, aqk, v_new, h, cu)


def bwd_prepare(opts, aqk, v_new, d_o, h, cu):
    """``(dAqk, dv_local, dq_raw)`` of ``chunk_kda_bwd_prepare``."""
    return _public("bwd_prepare", opts, aqk, v_new, d_o, h, cu)


def pre_process_bwd(opts, q, k, w, d_o, dv, gk, cu):
    """``[N, Hv, K, V + K]``, the backward affine summaries ``[dE | dM]`` of the local sequences."""
    return _public("pre_process_bwd", opts, q, k, w, d_o, dv, gk, cu)


def bwd_dhu(opts, q, k, w, d_o, dv, gk, dht, cu):
    """``(dh, dh0, dv_scan)`` of ``chunk_kda_bwd_dhu``."""
    return _public("bwd_dhu", opts, q, k, w, d_o, dv, gk, dht, cu)


def bwd_finalize(opts, *tensors):
    """``(dq, dk, dv, dbeta, dg, dA_log, ddt_bias)`` of ``chunk_kda_bwd_finalize``, without the final-state correction."""
    return _public("bwd_finalize", opts, *tensors)


def merge_fwd_bwd(opts, summaries, ranks):
    """Boundary state from the summaries of ``ranks``, in the order they are applied, from zero."""
    return chain.run("merge_fwd_bwd", opts, summaries, ranks)
