"""Raw gate -> natural-log decay, and its adjoint (KDA paper, channel-wise forget gate; section 2 of the design).

x = g + dt_bias
lower-bound gate (safe_gate):  a = lower_bound * sigmoid(exp(a_log) * x)      exp(a_log) = 1 without a_log
softplus gate:                 a = -exp(a_log) * softplus(x)
no gate in the kernel:         a = g
"""

from mindspore import Tensor, ops

from kcp.ops import numerics


def _biased(raw: Tensor, dt_bias: Tensor | None) -> Tensor:
    return raw if dt_bias is None else raw + dt_bias.reshape(1, raw.shape[1], 1, raw.shape[3])


def _slope(raw: Tensor, a_log: Tensor | None):
    return 1.0 if a_log is None else numerics.exp(a_log).reshape(1, raw.shape[1], 1, 1)


def log_decay(raw, a_log, dt_bias, use_gate: bool, safe_gate: bool, lower_bound: float) -> Tensor:
    """Natural-log decay a <= 0.

    Args:
        raw: ``[B, Hv, T, K]`` float32, the gate input g (or a itself without ``use_gate``).
        a_log: ``[Hv]`` float32 or None.
        dt_bias: ``[Hv, K]`` float32 or None.

    Returns:
        ``[B, Hv, T, K]`` float32.
    """
    if not use_gate:
        return raw
    x = _biased(raw, dt_bias)
    slope = _slope(raw, a_log)
    if safe_gate:
        return lower_bound * numerics.sigmoid(slope * x)
    return -slope * numerics.softplus(x)


def log_decay_grad(da, raw, a_log, dt_bias, use_gate: bool, safe_gate: bool, lower_bound: float):
    """Adjoint of :func:`log_decay`.

    Args:
        da: ``[B, Hv, T, K]`` float32, gradient of a.

    Returns:
        ``(dg [B, Hv, T, K], da_log [Hv] or None, ddt_bias [Hv, K] or None)``, float32; sums run over batch and tokens.
    """
    if not use_gate:
        return da, None, None
    x = _biased(raw, dt_bias)
    slope = _slope(raw, a_log)
    if safe_gate:
        # s (1 - s) as a product of two sigmoids: no cancellation when the gate saturates
        dx = da * (lower_bound * slope) * (numerics.sigmoid(slope * x) * numerics.sigmoid(-slope * x))
        slope_terms = dx * x
    else:
        dx = -slope * numerics.sigmoid(x) * da
        slope_terms = -slope * numerics.softplus(x) * da
    da_log = None if a_log is None else numerics.total(slope_terms, (0, 2, 3))
    ddt_bias = None if dt_bias is None else numerics.total(dx, (0, 2))
    return dx, da_log, ddt_bias


def l2_normalise(x: Tensor, epsilon: float):
    """``(x * rstd, rstd)`` over the last axis, rstd = 1 / sqrt(sum x^2 + epsilon) ``[..., T]``."""
    rstd = 1.0 / ops.sqrt((x * x).sum(-1) + epsilon)
    return x * ops.expand_dims(rstd, -1), rstd


def l2_normalise_grad(dy: Tensor, y: Tensor, rstd: Tensor) -> Tensor:
    """Adjoint of :func:`l2_normalise`: dx = rstd (dy - (dy.y) y)."""
    return ops.expand_dims(rstd, -1) * (dy - (dy * y).sum(-1, keepdims=True) * y)
