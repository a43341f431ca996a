"""All tokens of a sliced sequence on every rank: a differentiable all-gather along the sequence (MLA's latent, and whatever is small)."""

import mindspore as ms
from mindspore import nn, ops

from kcp.parallel.traffic import TOKENS


class GatherSequence(nn.Cell):
    """``[B, T_local, D] -> [B, T, D]`` on every rank; the gradient is summed over the ranks and sliced.

    Args:
        group: the :class:`~kcp.parallel.group.CpGroup`; slices may differ in length.
    """

    def __init__(self, group):
        super().__init__(auto_prefix=False)
        self.group = group

    def construct(self, x):
        lengths = self.group.lengths(x.shape[1])
        longest = self.group.longest(x.shape[1])
        if x.shape[1] < longest:
            x = ops.concat((x, ops.zeros((x.shape[0], longest - x.shape[1], x.shape[2]), x.dtype)), 1)
        gathered = self.group.collectives.all_gather(x, TOKENS)
        parts = []
        for r in range(self.group.size):
            parts.append(gathered[r][:, : lengths[r]])
        return ops.concat(tuple(parts), 1)

    def bprop(self, x, out, dout):
        begin, end = self.group.slice_bounds(dout.shape[1])
        whole = self.group.collectives.all_reduce(ops.cast(ops.depend(dout, out), ms.float32), TOKENS)
        return (ops.cast(whole[:, begin:end], x.dtype),)
