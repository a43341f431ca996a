"""The op as a chain of stages on Hyper-Parallel's kernels, opened at its state exchange for context parallelism (section 6 of the
Hyper-Parallel document; ``composite.py`` documents the protocol).

    forward    fwd_prepare | fwd_h -> fwd_finalize            saved: gk Akk ... h v_new, or nothing (recompute)
    backward   bwd_prepare | bwd_dhu -> bwd_finalize          then the final-state correction

A stage that Hyper-Parallel can't serve is completed by the next backend of the device, on float32 caches; a process says so once, in one
line a stage and reason. Under a forced ``ascend`` backend nothing is completed: the call raises with the limit.
"""

import logging
from dataclasses import replace

import mindspore as ms
from mindspore import Tensor, ops

from kcp.ops import backends
from kcp.ops.backends import ascend_correction as correction
from kcp.ops.backends import ascend_stages as kernels
from kcp.ops.backends.ascend_symbols import Refused
from kcp.ops.layouts import from_head_major, to_head_major, token_major, transpose_state

LOG = logging.getLogger("kcp")
RAW_INPUTS = {"fwd_prepare": 7}  # leading arguments of a stage that another backend takes as they are
_said: set[tuple[str, str]] = set()


def say_once(stage: str, server: str, why: str) -> None:
    """One log line a process for every stage and reason."""
    if (stage, why) not in _said:
        _said.add((stage, why))
        LOG.warning("kcp: %s is served by %s: %s", stage, server, why)


def other_backend(stage: str, why: str):
    """The backend that completes ``stage``.

    Raises:
        RuntimeError: ``ascend`` was asked for by name, or no other backend serves the stage on this device.
    """
    if backends.forced() == "ascend":
        raise RuntimeError(f"{stage}: {why} (the backend 'ascend' was asked for by name; without that another one would complete it)")
    module = backends.select(stage, after="ascend")
    say_once(stage, module.__name__.rsplit(".", 1)[-1], why)
    return module


def run(stage: str, opts, *tensors):
    """One stage on Hyper-Parallel's kernel, or completed by another backend."""
    try:
        return getattr(kernels, stage)(opts, *tensors)
    except Refused as limit:
        module = other_backend(stage, str(limit))
    if stage == "merge_fwd_bwd":
        return module.merge_fwd_bwd(opts, *tensors)
    raw = RAW_INPUTS.get(stage, 0)
    return getattr(module, stage)(opts, *tensors[:raw], *(_widened(x) for x in tensors[raw:]))


def _widened(x: Tensor) -> Tensor:
    return ops.cast(x, ms.float32) if x.dtype in (ms.bfloat16, ms.float16) else x


# ---- the op

GK, AQK, AKK, W, U, QG, KG, QG_SCALED, Q_HAT, K_HAT, Q_RSTD, K_RSTD, BETA = range(13)
KEPT = (GK, AQK, AKK, W, QG, KG, Q_HAT, K_HAT, Q_RSTD, K_RSTD, BETA)  # then h and v_new


def _stage_options(opts, **changes):
    """Options of the stages: log2 decays, K-first states, head-major tensors unless said."""
    return replace(opts, use_exp2=True, state_v_first=False, **changes)


def forward_open(opts, q, k, v, g, beta, a_log, dt_bias, cu):
    """The thirteen caches."""
    return tuple(run("fwd_prepare", _stage_options(opts), q, k, v, g, beta, a_log, dt_bias, cu))


def forward_summary(opts, cu, c):
    """Summaries ``[N, Hv, K, V + K]`` = ``[E | M]``."""
    return run("pre_process_fwd", _stage_options(opts, has_initial_state=False), c[KG], c[W], c[U], c[GK], cu)


def forward_end(opts, initial_state, cu, c):
    """Outgoing states for known incoming ones: the state kernel alone."""
    return run("fwd_h", _stage_options(opts, has_initial_state=True), c[KG], c[W], c[U], c[GK], initial_state, cu)[2]


def forward_close(opts, v, initial_state, cu, c):
    """``(out in v's dtype, final_state float32, saved)``."""
    stage = _stage_options(opts)
    h0 = transpose_state(initial_state, opts.state_v_first) if opts.has_initial_state else initial_state
    h, v_new, final_state = run("fwd_h", stage, c[KG], c[W], c[U], c[GK], h0, cu)
    out = run("fwd_finalize", replace(stage, layout=token_major(opts.layout)), c[QG_SCALED], c[AQK], v_new, h, cu)
    saved = (*(c[i] for i in KEPT), h, v_new) if opts.disable_recompute else ()
    return ops.cast(out, v.dtype), transpose_state(final_state, opts.state_v_first), saved


def backward_open(opts, q, k, v, g, beta, a_log, dt_bias, initial_state, cu, saved, d_out):
    """``(saved, (d_o head-major, dAqk, dv_local, dq_raw))``; saved is rebuilt if it is empty."""
    if not saved:
        caches = forward_open(opts, q, k, v, g, beta, a_log, dt_bias, cu)
        h0 = transpose_state(initial_state, opts.state_v_first) if opts.has_initial_state else initial_state
        h, v_new, _ = run("fwd_h", _stage_options(opts), caches[KG], caches[W], caches[U], caches[GK], h0, cu)
        saved = (*(caches[i] for i in KEPT), h, v_new)
    h, v_new = saved[-2:]
    d_o = ops.zeros(v_new.shape, v.dtype) if d_out is None else to_head_major(d_out, token_major(opts.layout))
    aqk = saved[KEPT.index(AQK)]
    return saved, (d_o, *run("bwd_prepare", _stage_options(opts, layout="BNSD"), aqk, v_new, d_o, h, cu))


def _state_gradients(opts, cu, saved, opened, d_final):
    """``(dh, dh0, dv_scan)``; d_final K-first or None."""
    gk, w, qg, kg = (saved[KEPT.index(i)] for i in (GK, W, QG, KG))
    stage = _stage_options(opts, has_initial_state=d_final is not None)
    placeholder = ops.zeros((1,), ms.float32) if d_final is None else d_final
    return run("bwd_dhu", stage, qg, kg, w, opened[0], opened[2], gk, placeholder, cu)


def backward_summary(opts, cu, saved, opened):
    """Backward summaries ``[N, Hv, K, V + K]`` = ``[dE | dM]``."""
    gk, w, qg, kg = (saved[KEPT.index(i)] for i in (GK, W, QG, KG))
    return run("pre_process_bwd", _stage_options(opts, has_initial_state=False), qg, kg, w, opened[0], opened[2], gk, cu)


def backward_end(opts, cu, saved, opened, d_final):
    """Gradients that leave towards earlier tokens: the state kernel alone (its gk is float32, the summary kernel's is bfloat16)."""
    return _state_gradients(opts, cu, saved, opened, d_final)[1]


def backward_close(opts, q, k, v, g, beta, a_log, dt_bias, initial_state, cu, saved, opened, d_final):
    """The eight gradients in the layouts, shapes and dtypes of the inputs."""
    gk, _, akk, w, _, _, q_hat, k_hat, q_rstd, k_rstd, beta_eff, h, v_new = saved
    d_state = None if d_final is None else transpose_state(d_final, opts.state_v_first)
    dh, dh0, dv_scan = _state_gradients(opts, cu, saved, opened, d_state)
    head_v, head_g, head_beta = (to_head_major(x, opts.layout) for x in (v, g, beta))
    grads = run(
        "bwd_finalize", _stage_options(opts, layout="BNSD"), q_hat, k_hat, head_v, gk, head_g, head_beta, a_log, dt_bias, akk, v_new, h,
        dh, dv_scan, opened[1], opened[3], q_rstd, k_rstd, cu,
    )  # fmt: skip
    if correction.wanted(d_final is not None):
        caches = (gk, akk, w, v_new, h)
        grads = correction.correct(opts, grads, k_hat, head_v, head_g, beta_eff, a_log, dt_bias, caches, dh, k_rstd, cu)
    dq, dk, dv, dbeta, dg, da_log, ddt_bias = grads

    def like(grad, x):
        return ops.cast(from_head_major(grad, opts.layout), x.dtype)

    dh0 = transpose_state(dh0, opts.state_v_first) if opts.has_initial_state else initial_state - initial_state
    return like(dq, q), like(dk, k), like(dv, v), like(dg, g), like(dbeta, beta), da_log, ddt_bias, dh0
