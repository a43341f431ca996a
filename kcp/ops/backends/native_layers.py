"""The layers around the attention on the native kernels (``native/entry_layers.cc``): one operator forward, one backward, float32.

Each is a Cell with its own adjoint, so that no intermediate but the inputs is kept. :mod:`kcp.layers.fused` says when they serve.
"""

from functools import lru_cache

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn
from mindspore.ops import constexpr

from kcp.ops.backends.native_call import bits, custom

HAS_GATE, HAS_BIAS, HAS_INTO = 1, 2, 4
MAX_TAPS = 32
ROW_BLOCK = 16  # experts' rows come in multiples of this
LANE = 32


def _options(present: int = 0, begin: int = 0, epsilon: float = 0.0) -> Tensor:
    """The options tensor: positions of ``Option`` in native/call.h."""
    numbers = [0] * 14
    numbers[6], numbers[7], numbers[11] = present, begin, bits(epsilon)
    return Tensor(np.array(numbers, np.int64))


def _floats(count):
    return lambda *args: (ms.float32,) * count if count > 1 else ms.float32


class Norm(nn.Cell):
    """``x / sqrt(mean(x^2) + epsilon) * weight`` over the last axis, times ``sigmoid(gate)`` if gated.

    Inputs: x ``[..., D]``, weight ``[D]``, gate (the shape of x, or one element if not gated).
    """

    def __init__(self, epsilon: float, gated: bool):
        super().__init__(auto_prefix=False)
        self.options = _options(HAS_GATE * gated, epsilon=epsilon)
        self.forward = custom("kcp_norm", lambda o, x, weight, gate: x, _floats(1), "norm")
        self.backward = custom("kcp_norm_backward", lambda o, x, weight, gate, d: (x, weight, gate), _floats(3), "norm")

    def construct(self, x, weight, gate):
        return self.forward(self.options, x, weight, gate)

    def bprop(self, x, weight, gate, out, dout):
        return self.backward(self.options, x, weight, gate, dout)


class Glu(nn.Cell):
    """``gate * sigmoid(gate) * up``, element by element."""

    def __init__(self):
        super().__init__(auto_prefix=False)
        self.options = _options()
        self.forward = custom("kcp_glu", lambda o, gate, up: gate, _floats(1), "glu")
        self.backward = custom("kcp_glu_backward", lambda o, gate, up, d: (gate, up), _floats(2), "glu")

    def construct(self, gate, up):
        return self.forward(self.options, gate, up)

    def bprop(self, gate, up, out, dout):
        return self.backward(self.options, gate, up, dout)


class Conv(nn.Cell):
    """The short convolution with its silu.

    Inputs: x ``[B, T, D]``, halo ``[B, size-1, D]``, weight ``[D, 1, size]``, bias ``[D]`` or one element, into ``[B or 1, T, 1]`` int32 or
    one element.
    """

    def __init__(self, has_bias: bool, has_into: bool):
        super().__init__(auto_prefix=False)
        self.options = _options(HAS_BIAS * has_bias + HAS_INTO * has_into)
        self.forward = custom("kcp_conv", lambda o, x, *rest: x, _floats(1), "conv")
        self.backward = custom("kcp_conv_backward", lambda o, x, halo, w, bias, into, d: (x, halo, w, bias), _floats(4), "conv")

    def construct(self, x, halo, weight, bias, into):
        return self.forward(self.options, x, halo, weight, bias, into)

    def bprop(self, x, halo, weight, bias, into, out, dout):
        dx, d_halo, d_weight, d_bias = self.backward(self.options, x, halo, weight, bias, into, dout)
        return dx, d_halo, d_weight, d_bias, into - into


class Softmax(nn.Cell):
    """Softmax rows of queries ``begin ..`` over the keys before them in their documents; 0 for the others.

    Inputs: scores ``[B, H, Tq, Tk]``, into ``[B or 1, Tq, 1]`` int32 or one element.
    """

    def __init__(self, begin: int, has_into: bool):
        super().__init__(auto_prefix=False)
        self.options = _options(HAS_INTO * has_into, begin)
        self.forward = custom("kcp_softmax", lambda o, scores, into: scores, _floats(1), "softmax")
        self.backward = custom("kcp_softmax_backward", lambda o, out, d, into: out, _floats(1), "softmax")

    def construct(self, scores, into):
        return self.forward(self.options, scores, into)

    def bprop(self, scores, into, out, dout):
        return self.backward(self.options, out, dout, into), into - into


class CrossEntropy(nn.Cell):
    """``log sum_v exp(x_v) - x_label`` of every row, without the label's part where that lies outside the row.

    Inputs: logits ``[N, V]``, labels ``[N]`` int32.
    """

    def __init__(self):
        super().__init__(auto_prefix=False)
        self.options = _options()
        self.forward = custom("kcp_cross_entropy", lambda o, logits, labels: labels, _floats(1), "cross entropy")
        self.backward = custom("kcp_cross_entropy_backward", lambda o, logits, labels, d: logits, _floats(1), "cross entropy")

    def construct(self, logits, labels):
        return self.forward(self.options, logits, labels)

    def bprop(self, logits, labels, out, dout):
        return self.backward(self.options, logits, labels, dout), labels - labels


class GroupedLinear(nn.Cell):
    """``y = x W_e^T`` for rows grouped by expert.

    Inputs: x ``[R, I]``; ends ``[E]`` int32, where each expert's rows end, multiples of 16; weights: a tuple of E matrices ``[O, I]``.
    Rows behind the last expert's become 0. O and I are multiples of 32.
    """

    def __init__(self, num_experts: int):
        super().__init__(auto_prefix=False)
        self.options = _options()
        self.forward = custom("kcp_grouped", lambda o, x, ends, w, *rest: (x[0], w[0]), _floats(1), f"grouped {num_experts}")
        shapes = lambda o, x, ends, d, *weights: (x,) + tuple(weights)  # noqa: E731
        self.backward = custom("kcp_grouped_backward", shapes, _floats(1 + num_experts), f"grouped {num_experts}")

    def construct(self, x, ends, weights):
        return self.forward(self.options, x, ends, *weights)

    def bprop(self, x, ends, weights, out, dout):
        grads = self.backward(self.options, x, ends, dout, *weights)
        return grads[0], ends - ends, grads[1:]


_KINDS = {cell.__name__: cell for cell in (Norm, Glu, Conv, Softmax, CrossEntropy, GroupedLinear)}


@lru_cache(256)
def _cell(kind, options):
    return _KINDS[kind](*options)


@constexpr(check=False)
def layer_cell(kind: str, *options) -> nn.Cell:
    """The Cell of a layer with its options, one for all that are alike."""
    return _cell(kind, options)
