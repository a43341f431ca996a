"""The few collectives that kcp uses, and the one place where devices differ.

Every method takes this rank's tensor and works in PyNative and in graphs. On the CPU MindSpore has AllReduce and AllGather only: an
all-to-all is served by an all-gather of everything, which moves ``size`` times its payload.
"""

import mindspore as ms
from mindspore import Tensor, ops


@ms.jit_class
class Collectives:
    """Collectives among the ranks of one communication group (the world by default)."""

    def __init__(self, rank: int, size: int, group: str | None = None):
        self.rank = rank
        self.size = size
        self.has_all_to_all = ms.get_context("device_target") != "CPU"
        if group is None:
            self._gather, self._reduce = ops.AllGather(), ops.AllReduce()
        else:
            self._gather, self._reduce = ops.AllGather(group=group), ops.AllReduce(group=group)
        if self.has_all_to_all:
            self._exchange = ops.AlltoAll(size, 0, 0) if group is None else ops.AlltoAll(size, 0, 0, group=group)

    def all_gather(self, x: Tensor) -> Tensor:
        """``[...] -> [size, ...]``, rank order; bfloat16 travels as float32 on the CPU."""
        if not self.has_all_to_all and x.dtype == ms.bfloat16:
            return ops.cast(self._gather(ops.expand_dims(ops.cast(x, ms.float32), 0)), ms.bfloat16)
        return self._gather(ops.expand_dims(x, 0))

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over the ranks, the same bits on every rank."""
        return self._reduce(x)

    def all_to_all(self, x: Tensor) -> Tensor:
        """``[size, ...]`` with entry r for rank r -> ``[size, ...]`` with entry r from rank r."""
        if self.has_all_to_all:
            return self._exchange(x)
        return self.all_gather(x)[:, self.rank]


@ms.jit_class
class SingleRank:
    """Collectives of a group of one: nothing moves."""

    def __init__(self):
        self.rank = 0
        self.size = 1

    def all_gather(self, x: Tensor) -> Tensor:
        return ops.expand_dims(x, 0)

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_to_all(self, x: Tensor) -> Tensor:
        return x
