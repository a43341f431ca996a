"""The SwiGLU feed-forward layer, ``down(silu(gate(x)) * up(x))``."""

import mindspore as ms
from mindspore import nn

from kcp.layers.fused import layer_cell, serves
from kcp.layers.linear import Linear
from kcp.ops.numerics import silu


def silu_times(gate, up):
    """``silu(gate) * up`` in the dtype of gate, computed in float32."""
    if serves(gate.shape):
        return layer_cell("Glu")(gate.astype(ms.float32), up.astype(ms.float32)).astype(gate.dtype)
    return silu(gate.astype(ms.float32)).astype(gate.dtype) * up


class SwiGLU(nn.Cell):
    """Gated feed-forward layer with three bias-free projections.

    Args:
        hidden_size: Size of the input and the output.
        intermediate_size: Size between the projections.
        init_std: Standard deviation of the weights' initial distribution.

    Inputs:
        x ``[..., hidden_size]``, any float dtype.

    Outputs:
        ``[..., hidden_size]``, the dtype of x.
    """

    def __init__(self, hidden_size: int, intermediate_size: int, init_std: float = 0.02):
        super().__init__()
        self.gate_proj = Linear(hidden_size, intermediate_size, init_std=init_std)
        self.up_proj = Linear(hidden_size, intermediate_size, init_std=init_std)
        self.down_proj = Linear(intermediate_size, hidden_size, init_std=init_std)

    def construct(self, x):
        return self.down_proj(silu_times(self.gate_proj(x), self.up_proj(x)))
