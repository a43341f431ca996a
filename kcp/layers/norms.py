"""RMSNorm, and the gated RMSNorm that closes a KDA layer (Kimi Linear report: ``Sigmoid(gate) * RMSNorm(o)``).

Statistics and products are float32 whatever the storage type; the result has the input's dtype.
"""

import mindspore as ms
from mindspore import nn, ops
from mindspore.common._grad_function import _Function
from mindspore.common.initializer import initializer

from kcp.ops.numerics import BLOCK, in_graph, sigmoid, total


def _rms_normalize(x_float, eps):
    """``x / sqrt(mean(x^2) + eps)`` over the last axis; x float32."""
    return x_float * ops.rsqrt((x_float * x_float).mean(-1, keep_dims=True) + eps)


class RMSNorm(nn.Cell):
    """``weight * x / sqrt(mean(x^2) + eps)`` over the last axis.

    Args:
        dim: Size of the last axis.
        eps: Added to the mean square.

    Inputs:
        x ``[..., dim]``, any float dtype.

    Outputs:
        ``[..., dim]``, the dtype of x.
    """

    def __init__(self, dim: int, eps: float = 1e-5):
        super().__init__()
        self.eps = eps
        self.weight = ms.Parameter(initializer("ones", (dim,), ms.float32), name="weight")

    def construct(self, x):
        return (_rms_normalize(x.astype(ms.float32), self.eps) * self.weight).astype(x.dtype)


def _gated(x, gate, weight, eps):
    normalized = _rms_normalize(x.astype(ms.float32), eps) * weight
    return (normalized * sigmoid(gate.astype(ms.float32))).astype(x.dtype)


class _Blocks(_Function):
    """The gated norm in PyNative, a block of rows at a time: keeps its inputs alone."""

    @staticmethod
    def forward(ctx, x, gate, weight, eps, block):
        ctx.save_for_backward(x, gate, weight)
        ctx.eps, ctx.rows = eps, max(1, block // x.shape[-1])
        rows, gates = x.reshape((-1, x.shape[-1])), gate.reshape((-1, x.shape[-1]))
        parts = [_gated(rows[i : i + ctx.rows], gates[i : i + ctx.rows], weight, eps) for i in range(0, rows.shape[0], ctx.rows)]
        return ops.concat(tuple(parts), 0).reshape(x.shape)

    @staticmethod
    def backward(ctx, grad):
        x, gate, weight = ctx.saved_tensors
        width = x.shape[-1]
        rows, gates, grads = x.reshape((-1, width)), gate.reshape((-1, width)), grad.reshape((-1, width))
        dx, d_gate, d_weight = [], [], 0.0
        for i in range(0, rows.shape[0], ctx.rows):
            x_b, gate_b, grad_b = (part[i : i + ctx.rows].astype(ms.float32) for part in (rows, gates, grads))
            rstd = ops.rsqrt((x_b * x_b).mean(-1, keep_dims=True) + ctx.eps)
            normalized, opened = x_b * rstd, grad_b * sigmoid(gate_b)
            d_weight = d_weight + total(opened * normalized, (0,))
            d_normalized = opened * weight
            dx.append((rstd * (d_normalized - normalized * (d_normalized * normalized).mean(-1, keep_dims=True))).astype(x.dtype))
            d_gate.append((d_normalized * normalized * sigmoid(-gate_b)).astype(gate.dtype))
        return ops.concat(tuple(dx), 0).reshape(x.shape), ops.concat(tuple(d_gate), 0).reshape(x.shape), d_weight, None, None


class GatedRMSNorm(nn.Cell):
    """``weight * x / sqrt(mean(x^2) + eps) * sigmoid(gate)`` over the last axis.

    Args:
        dim: Size of the last axis (the value head dimension).
        eps: Added to the mean square.

    Inputs:
        x ``[..., dim]``, any float dtype; gate, the same shape, before the sigmoid.

    Outputs:
        ``[..., dim]``, the dtype of x.
    """

    def __init__(self, dim: int, eps: float = 1e-5):
        super().__init__()
        self.eps = eps
        self.block = BLOCK
        self.weight = ms.Parameter(initializer("ones", (dim,), ms.float32), name="weight")

    def construct(self, x, gate):
        if not in_graph() and x.size > self.block:
            return _Blocks.apply(x, gate, self.weight, self.eps, self.block)
        return _gated(x, gate, self.weight, self.eps)
