"""The op opened at its state exchange, for context parallelism, on the fused kernels.

Nothing is kept between the halves: summary and forward each prepare their chunks in cache, which is cheaper than storing them once
(1.8 forwards in all against 1.9 through the stages; docs/kernels.md). ``composite.py`` documents the protocol.
"""

from dataclasses import replace

from mindspore import ops
from mindspore.ops import constexpr

from kcp.ops.backends.native_fused import op_backward, op_forward, op_state_gradient, op_summary


@constexpr(check=False)
def _without_initial_state(opts):
    return replace(opts, has_initial_state=False)


def forward_open(opts, q, k, v, g, beta, a_log, dt_bias, cu):
    """Nothing: the fused kernels start from the inputs."""
    return ()


def forward_summary(opts, q, k, v, g, beta, a_log, dt_bias, cu, opened):
    """Summaries ``[N, Hv, K, V + K]`` = ``[E | M]`` of the local sequences."""
    return op_summary(_without_initial_state(opts), q, k, v, g, beta, a_log, dt_bias, dt_bias, cu)


def forward_end(opts, q, k, v, g, beta, a_log, dt_bias, initial_state, cu, opened):
    """Outgoing states ``[N, Hv, K, V]`` of the local sequences for known incoming ones."""
    return op_summary(opts, q, k, v, g, beta, a_log, dt_bias, initial_state, cu, with_transition=False)


def forward_close(opts, q, k, v, g, beta, a_log, dt_bias, initial_state, cu, opened):
    """The whole forward from its initial states."""
    return op_forward(opts, q, k, v, g, beta, a_log, dt_bias, initial_state, cu)


def backward_open(opts, q, k, v, g, beta, a_log, dt_bias, initial_state, cu, saved, d_out):
    """``(saved, inputs of the backward kernels)``."""
    if d_out is None:
        d_out = ops.zeros(v.shape, v.dtype)
    return saved, (q, k, v, g, beta, a_log, dt_bias, d_out)


def backward_end(opts, q, cu, saved, opened, d_final):
    """Gradients ``[N, Hv, K, V]`` that leave towards earlier tokens for known final-state gradients."""
    q, k, v, g, beta, a_log, dt_bias, d_out = opened
    return op_state_gradient(opts, q, k, v, g, beta, a_log, dt_bias, cu, saved, d_out, d_final)


def backward_summary(opts, q, cu, saved, opened):
    """Backward summaries ``[N, Hv, K, V + K]`` = ``[dE | dM]``; dM is the forward's M transposed."""
    q, k, v, g, beta, a_log, dt_bias, d_out = opened
    d_e = op_state_gradient(opts, q, k, v, g, beta, a_log, dt_bias, cu, saved, d_out, None)
    forward = op_summary(_without_initial_state(opts), q, k, v, g, beta, a_log, dt_bias, dt_bias, cu)
    return ops.concat((d_e, ops.swapaxes(forward[..., v.shape[-1] :], -1, -2)), -1)


def backward_close(opts, q, k, v, g, beta, a_log, dt_bias, initial_state, cu, saved, opened, d_final):
    """The whole backward from the final states' gradients."""
    return op_backward(opts, q, k, v, g, beta, a_log, dt_bias, initial_state, cu, saved, opened[7], d_final)
