"""Cross entropy summed over the valid tokens.

Per token: ``loss = log sum_v exp(z_v) - z_label`` with ``z = logits - max(logits)``, and
``dlogits = softmax(logits) - onehot(label)``. Summed, not averaged: the mean needs the count of all ranks.
"""

import mindspore as ms
from mindspore import Tensor, nn, ops

from kcp.layers.fused import layer_cell, serves
from kcp.ops.numerics import exp, total, wide_dtype


def valid_tokens(labels, loss_mask):
    """1.0 where a token counts: its label is not negative and its mask is not zero; float32, the shape of labels."""
    return ops.logical_and(labels >= 0, loss_mask != 0).astype(ms.float32)


class SummedCrossEntropy(nn.Cell):
    """Sum of the tokens' cross entropies, each times its weight.

    Inputs:
        logits ``[N, vocabulary]`` of any float dtype, labels ``[N]`` int32, weights ``[N]`` float32.
        A label may be negative where the weight is 0.

    Outputs:
        Scalar, float32. Labels and weights get no gradient (zeros).
    """

    def __init__(self):
        super().__init__()
        self.rows = _CrossEntropyRows()

    def construct(self, logits, labels, weights):
        if logits.dtype == ms.float32 and serves(logits.shape):
            losses = layer_cell("CrossEntropy")(logits, labels.astype(ms.int32))
        else:
            losses = self.rows(logits, labels)
        return total(losses * ops.stop_gradient(weights), (0,))


class _CrossEntropyRows(nn.Cell):
    """The cross entropy of every row in MindSpore's operators, with its own adjoint."""

    def __init__(self):
        super().__init__()
        # Primitives: library functions with branches inside a bprop break graph mode.
        self.row_maximum = ops.ReduceMax(keep_dims=True)
        self.one_hot = ops.OneHot()
        self.one = Tensor(1.0, ms.float32)
        self.zero = Tensor(0.0, ms.float32)

    def construct(self, logits, labels):
        z = self._shifted(logits)
        log_sum = ops.log(total(exp(z), (1,)).astype(wide_dtype())).astype(ms.float32)
        of_label = self._one_hot(labels, z) != 0  # a product with it would turn a masked column's -inf into NaN
        return log_sum - ops.select(of_label, z, 0.0).sum(-1)

    def bprop(self, logits, labels, out, dout):
        z = self._shifted(logits)
        e = exp(z)
        softmax = e / total(e, (1,)).expand_dims(-1)
        dlogits = (softmax - self._one_hot(labels, z)) * dout.expand_dims(-1)
        return dlogits.astype(logits.dtype), labels - labels

    def _shifted(self, logits):
        logits = logits.astype(ms.float32)
        return logits - self.row_maximum(logits, -1)

    def _one_hot(self, labels, z):
        return self.one_hot(labels, z.shape[-1], self.one, self.zero)
