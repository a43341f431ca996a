"""Context-parallel groups smaller than the launch: consecutive ranks share a sample, such groups share the batch."""

import mindspore as ms
import numpy as np
from mindspore import Tensor, ops
from mindspore.communication import create_group

from kcp.parallel.collectives import Collectives
from kcp.parallel.group import CpGroup


@ms.jit_class
class SubgroupCollectives(Collectives):
    """Collectives of a part of the launch on the CPU, whose AllGather serves the whole launch alone.

    An all-gather is a sum over the group: each rank adds its tensor at its own place among zeros.
    """

    def __init__(self, rank: int, size: int, group: str):
        super().__init__(rank, size, group)
        self.place = Tensor(np.arange(size) == rank, ms.float32)

    def all_gather(self, x: Tensor) -> Tensor:
        """``[...] -> [size, ...]``, rank order; every dtype travels as float32."""
        place = self.place.reshape((self.size,) + (1,) * x.ndim)
        return ops.cast(self.all_reduce(place * ops.expand_dims(ops.cast(x, ms.float32), 0)), x.dtype)


def context_parallel_group(size: int) -> CpGroup:
    """The context-parallel group of this process: ``size`` consecutive ranks, the first starting at a multiple of size.

    Args:
        size: Ranks that share a sample.

    Returns:
        The group; of one rank for size 1, the whole launch if it has ``size`` ranks.

    Raises:
        ValueError: The number of launched ranks is not a multiple of ``size``.
    """
    if size == 1:
        return CpGroup.single()
    world = CpGroup.world()
    if world.size == size:
        return world
    if world.size % size:
        raise ValueError(
            f"context_parallel_size: {size} is not supported; the launch has {world.size} ranks, "
            "a multiple of context_parallel_size is needed"
        )
    rank, begin = world.rank % size, world.rank // size * size
    name = f"kcp_context_parallel_{begin}"
    create_group(name, list(range(begin, begin + size)))
    on_cpu = ms.get_context("device_target") == "CPU"
    collectives = (SubgroupCollectives if on_cpu else Collectives)(rank, size, name)
    return CpGroup(rank, size, collectives=collectives)
