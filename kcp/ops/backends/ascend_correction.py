"""Undo what bfloat16 storage of v_new does to gradients that come through the state (design section 5; section 8.2 of the Hyper-Parallel
document: dk off by 6.87 % when the loss is the final state alone).

The kernels store u and v_new as bfloat16. In ``dkg = v_new dh^T`` their rounding is summed over V against a state gradient that hardly
varies, while the values themselves cancel. The rounding is known here, outside the kernels:

    r    = (Akk (beta v) - w h) in float32 - v_new as stored
    dkg += r dh^T                           and from there, linearly,
    dk  += 2^(G_last - G) r dh^T            through the norm
    da  += what that adds to the gradient of the log decay: k (...) of the earlier tokens of the chunk; through the gate
"""

import contextlib
import os
from collections.abc import Iterator

from mindspore import ops

from kcp.ops.backends import composite
from kcp.ops.backends.ascend_layout import f32
from kcp.ops.backends.chunk_math import batch_constant
from kcp.ops.gates import l2_normalise_grad, log_decay_grad
from kcp.ops.layouts import expand_heads, reduce_heads
from kcp.ops.numerics import exp2, matmul

VARIABLE = "KCP_ASCEND_CORRECTION"
MODES = ("auto", "always", "off")
_asked: list[str] = []


def mode() -> str:
    """``"auto"``: where a gradient of the final state arrives; ``"always"``; ``"off"``. By :func:`use`, else ``KCP_ASCEND_CORRECTION``."""
    value = _asked[-1] if _asked else os.environ.get(VARIABLE, "") or "auto"
    if value not in MODES:
        raise ValueError(f"{VARIABLE} is {value!r}; allowed: {', '.join(MODES)}")
    return value


@contextlib.contextmanager
def use(value: str) -> Iterator[None]:
    """Set the mode for the calls inside the ``with`` block (their backward included)."""
    if value not in MODES:
        raise ValueError(f"correction is {value!r}; allowed: {', '.join(MODES)}")
    _asked.append(value)
    try:
        yield
    finally:
        _asked.pop()


def wanted(has_final_gradient: bool) -> bool:
    """Whether a backward corrects its gradients."""
    return mode() == "always" or (mode() == "auto" and has_final_gradient)


def correct(opts, grads, k_hat, v, g, beta_eff, a_log, dt_bias, caches, dh, k_rstd, cu):
    """Add what the rounding of v_new took away.

    Args:
        opts: options of the op; grads: ``(dq, dk, dv, dbeta, dg, da_log, ddt_bias)``, token gradients head-major, float32.
        k_hat: normalised keys ``[B, Hk, T, K]``; v ``[B, Hv, T, V]``, g ``[B, Hv, T, K]`` as given; beta_eff ``[B, Hv, T]``.
        caches: ``(gk, akk, w, v_new)`` by token and h ``[B, Nc, Hv, K, V]``, as the kernels stored them, gk in log2.
        dh: state gradients ``[B, Nc, Hv, K, V]``.

    Returns:
        The seven gradients, float32.
    """
    gk, akk, w, v_new, h = (f32(x) for x in caches)
    plan, index = composite.stage_plan(opts, cu, v.shape[2])

    def split(x):
        return plan.split(f32(x), index)

    written = split(v) * ops.expand_dims(split(beta_eff), -1)
    h, dh = ops.swapaxes(h, 1, 2), ops.swapaxes(f32(dh), 1, 2)
    lost = matmul(split(akk), written) - matmul(split(w), h) - split(v_new)
    gk = plan.split(gk, index, True)
    to_end = exp2(gk[..., -1:, :] - gk)
    d_column = to_end * matmul(lost, dh, transpose_b=True)
    k = split(expand_heads(f32(k_hat), v.shape[1]))
    strict = batch_constant("strict", akk.shape[-1], split(akk))
    da = plan.merge(matmul(strict, k * d_column), index)

    dk = reduce_heads(plan.merge(d_column, index), k_hat.shape[1])
    if opts.use_qk_l2norm_in_kernel:
        dk = l2_normalise_grad(dk, f32(k_hat), f32(k_rstd))
    used_a_log, used_dt_bias = (a_log if opts.has_a_log else None), (dt_bias if opts.has_dt_bias else None)
    dg, da_log, ddt_bias = log_decay_grad(da, f32(g), used_a_log, used_dt_bias, opts.use_gate_in_kernel, opts.safe_gate, opts.lower_bound)
    return (
        grads[0],
        f32(grads[1]) + dk,
        *grads[2:4],
        f32(grads[4]) + dg,
        grads[5] if da_log is None else grads[5] + da_log,
        grads[6] if ddt_bias is None else grads[6] + ddt_bias.reshape(grads[6].shape),
    )
