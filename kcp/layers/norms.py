"""RMSNorm, and the gated RMSNorm that closes a KDA layer (Kimi Linear report: ``Sigmoid(gate) * RMSNorm(o)``).

Statistics and products are float32 whatever the storage type; the result has the input's dtype.
"""

import mindspore as ms
from mindspore import nn, ops
from mindspore.common.initializer import initializer

from kcp.layers.fused import layer_cell, serves
from kcp.ops.numerics import sigmoid


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
        self.no_gate = ms.Tensor([0.0], ms.float32)

    def construct(self, x):
        if serves(x.shape):
            return layer_cell("Norm", self.eps, False)(x.astype(ms.float32), self.weight, self.no_gate).astype(x.dtype)
        return (_rms_normalize(x.astype(ms.float32), self.eps) * self.weight).astype(x.dtype)


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
        self.weight = ms.Parameter(initializer("ones", (dim,), ms.float32), name="weight")

    def construct(self, x, gate):
        if serves(x.shape):
            return layer_cell("Norm", self.eps, True)(x.astype(ms.float32), self.weight, gate.astype(ms.float32)).astype(x.dtype)
        normalized = _rms_normalize(x.astype(ms.float32), self.eps) * self.weight
        return (normalized * sigmoid(gate.astype(ms.float32))).astype(x.dtype)
