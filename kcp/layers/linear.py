"""Linear and Embedding: plain cells with Hugging Face's weight layout, no dependency on MindFormers.

Shape suffixes: ``_NI`` tokens by input features, ``_NO`` tokens by output features, ``_OI`` a weight.
"""

import mindspore as ms
from mindspore import nn, ops
from mindspore.common.initializer import Normal, initializer

from kcp.ops.numerics import in_graph

_matmul = ops.MatMul(transpose_b=True)


def _product(x, weight_OI):
    """x W^T ``[..., O]``. In PyNative a tensor of its own memory, not a view of a matrix: custom operators copy views first."""
    if not in_graph():
        return ops.dense(x, weight_OI)
    return _matmul(x.reshape((-1, x.shape[-1])), weight_OI).reshape(x.shape[:-1] + weight_OI.shape[:1])  # dense: no empty slices in graphs


class Linear(nn.Cell):
    """``y = x W^T + b`` over the last axis.

    Args:
        in_features: Size of the input's last axis.
        out_features: Size of the output's last axis.
        has_bias: Whether a bias, zero at the start, is added.
        init_std: Standard deviation of the normal distribution that the weight starts from.

    Inputs:
        x ``[..., in_features]``, any float dtype. The float32 weight is cast to it.

    Outputs:
        ``[..., out_features]``, the dtype of x.
    """

    def __init__(self, in_features: int, out_features: int, has_bias: bool = False, init_std: float = 0.02):
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.has_bias = has_bias
        shape = (out_features, in_features)
        self.weight = ms.Parameter(initializer(Normal(sigma=init_std), shape, ms.float32), name="weight")
        if has_bias:
            self.bias = ms.Parameter(initializer("zeros", (out_features,), ms.float32), name="bias")

    def construct(self, x):
        y = _product(x, self.weight.astype(x.dtype))
        return y + self.bias.astype(x.dtype) if self.has_bias else y


def side_by_side(x: ms.Tensor, *layers: nn.Cell) -> ms.Tensor:
    """Outputs of ``layers`` on x next to each other: ``[..., I] -> [..., O_1 + O_2 + ...]``.

    In PyNative, plain :class:`Linear` layers without biases are one product with all their weights: the results, and in the backward their
    gradients, are not copied together and apart. A layer that something else has replaced (an adapter) is called.
    """
    if not in_graph():
        if all(type(layer) is Linear and not layer.has_bias for layer in layers):
            return _product(x, ops.concat([layer.weight for layer in layers], 0).astype(x.dtype))
    return ops.concat([layer(x) for layer in layers], -1)


class Embedding(nn.Cell):
    """Rows of a table by token id, as a gather: ``mint``'s embedding has no gradient on the CPU.

    Args:
        vocab_size: Number of rows.
        dim: Size of a row.
        init_std: Standard deviation of the normal distribution that the table starts from.

    Inputs:
        token_ids, int32 of any shape, each in ``[0, vocab_size)``.

    Outputs:
        ``token_ids.shape + [dim]``, float32.
    """

    def __init__(self, vocab_size: int, dim: int, init_std: float = 0.02):
        super().__init__()
        self.weight = ms.Parameter(initializer(Normal(sigma=init_std), (vocab_size, dim), ms.float32), name="weight")

    def construct(self, token_ids):
        return ops.gather(self.weight, token_ids, 0)
