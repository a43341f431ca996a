"""The few collectives that kcp uses, and the one place where devices and execution modes differ.

Every method takes this rank's tensor and works in PyNative and in graphs, but for ``send`` and ``recv``, which MindSpore has in PyNative
alone: where :meth:`Collectives.has_point_to_point` says no, ``round`` serves instead. On the CPU MindSpore has AllReduce and AllGather
only: an all-to-all is served by an all-gather of everything, which moves ``size`` times its payload.

``purpose`` says what an exchange is for, one of :data:`kcp.parallel.traffic.PURPOSES`; what arrives is counted under it in PyNative.
"""

import mindspore as ms
import numpy as np
from mindspore import Tensor, ops
from mindspore.ops import constexpr

from kcp.parallel import traffic

_created_groups: set[str] = set()


@constexpr
def _axis_first(axis: int, ndim: int) -> tuple:
    return (axis,) + tuple(i for i in range(ndim) if i != axis)


@ms.jit_class
class Collectives:
    """Collectives among the ranks of one communication group (the world by default).

    Args:
        rank, size: this rank within the group, and the group's size.
        group: name of the communication group; None: the world.
        world_ranks: the members' ranks in the launch, in order; None: 0 to size - 1.
    """

    def __init__(self, rank: int, size: int, group: str | None = None, world_ranks: range | None = None):
        self.rank = rank
        self.size = size
        self.world_ranks = tuple(range(size) if world_ranks is None else world_ranks)
        self.has_all_to_all = ms.get_context("device_target") != "CPU"
        self.gathered = size - 1  # payloads that an all-gather moves to a rank
        self.number = Tensor([rank], ms.int32)
        if group is None:
            self._gather, self._reduce = ops.AllGather(), ops.AllReduce()
        else:
            self._gather, self._reduce = ops.AllGather(group=group), ops.AllReduce(group=group)
        if self.has_all_to_all:
            self._exchange = ops.AlltoAll(size, 0, 0) if group is None else ops.AlltoAll(size, 0, 0, group=group)

    @property
    def traffic(self) -> traffic.Traffic:
        """What this process received, over all its groups."""
        return traffic.of_process()

    def all_gather(self, x: Tensor, purpose: str) -> Tensor:
        """``[...] -> [size, ...]``, rank order; bfloat16 travels as float32 on the CPU."""
        traffic.count(traffic.probe, purpose, x.shape, x.dtype, self.size - 1, self.gathered, self.gathers_wide(x.dtype))
        return self._gather_all(x)

    def gathers_wide(self, dtype) -> bool:
        """Whether an all-gather turns this dtype into float32."""
        return not self.has_all_to_all and dtype == ms.bfloat16

    def _gather_all(self, x):
        if not self.has_all_to_all and x.dtype == ms.bfloat16:
            return ops.cast(self._gather(ops.expand_dims(ops.cast(x, ms.float32), 0)), ms.bfloat16)
        return self._gather(ops.expand_dims(x, 0))

    def all_reduce(self, x: Tensor, purpose: str) -> Tensor:
        """Sum over the ranks, the same bits on every rank."""
        traffic.count(traffic.probe, purpose, x.shape, x.dtype, 1, 1, False)
        return self._reduce(x)

    def all_to_all(self, x: Tensor, purpose: str, axis: int = 0) -> Tensor:
        """``x`` with ``size`` entries along ``axis``, entry r for rank r -> ``[size, ...]`` without that axis, entry r from rank r."""
        payload = x.shape[:axis] + x.shape[axis + 1 :]
        moved = self.size - 1 if self.has_all_to_all else self.size * self.gathered
        traffic.count(traffic.probe, purpose, payload, x.dtype, self.size - 1, moved, self.gathers_wide(x.dtype))
        if self.has_all_to_all:
            return self._exchange(ops.transpose(x, _axis_first(axis, x.ndim)))
        # a gather copies whole rows, where a slice or a transpose goes number by number on the CPU; it does not know bfloat16
        if x.dtype == ms.bfloat16:
            mine = ops.gather(self._gather_all(ops.cast(x, ms.float32)), self.number, axis + 1)
            return ops.cast(mine.reshape((self.size,) + payload), ms.bfloat16)
        return ops.gather(self._gather_all(x), self.number, axis + 1).reshape((self.size,) + payload)

    def has_point_to_point(self, compiled: bool) -> bool:
        """Whether ``send`` and ``recv`` can be used: in PyNative, not in code that is ``compiled`` to a graph."""
        return not compiled

    def send(self, x: Tensor, target: int, purpose: str) -> None:
        """Send float32 ``x`` to rank ``target``, which must call ``recv`` for this shape (PyNative)."""
        traffic.count(traffic.probe, purpose, x.shape, x.dtype, 0, 0, False)
        _device_send(x, self.world_ranks[target])

    def recv(self, shape: tuple, source: int, purpose: str) -> Tensor:
        """Receive a float32 tensor of ``shape`` from rank ``source`` (PyNative)."""
        traffic.count(traffic.probe, purpose, shape, ms.float32, 1, 1, False)
        return _device_recv(shape, self.world_ranks[source])

    def round(self, x: Tensor, source: int, purpose: str) -> Tensor:
        """One round of point to point where there is none: what ``source`` put in.

        Every rank of the group takes part, with tensors of one shape (zeros where it has nothing to say); ``source`` may be this rank
        itself, which then waits for the others and learns nothing. Served by an all-gather: each rank receives ``size - 1`` payloads
        where point to point moves one.
        """
        arrives = 1 if source != self.rank else 0
        traffic.count(traffic.probe, purpose, x.shape, x.dtype, arrives, self.gathered, False)
        return self._gather_all(x)[source]

    def subgroup(self, ranks: range) -> "Collectives":
        """Collectives of a part of this group that this rank belongs to; every member must ask for it before the first graph."""
        from mindspore.communication import create_group

        world_ranks = [self.world_ranks[r] for r in ranks]
        step = world_ranks[1] - world_ranks[0] if len(world_ranks) > 1 else 1
        world_ranks = range(world_ranks[0], world_ranks[0] + step * len(world_ranks), step)
        name = f"kcp_ranks_{world_ranks.start}_{step}_{len(world_ranks)}"
        if name not in _created_groups:
            create_group(name, list(world_ranks))
            _created_groups.add(name)
        kind = Collectives if self.has_all_to_all else SubgroupCollectives
        return kind(ranks.index(self.rank), len(ranks), name, world_ranks)


@ms.jit_class
class SubgroupCollectives(Collectives):
    """Collectives of a part of the launch on the CPU, whose AllGather serves the whole launch alone.

    An all-gather is a sum over the group: each rank adds its tensor, as float32, at its own place among zeros, so ``size`` times the
    payload is summed.
    """

    def __init__(self, rank: int, size: int, group: str, world_ranks: range | None = None):
        super().__init__(rank, size, group, world_ranks)
        self.place = Tensor(np.arange(size) == rank, ms.float32)
        self.gathered = size

    def gathers_wide(self, dtype) -> bool:
        return True

    def _gather_all(self, x):
        place = self.place.reshape((self.size,) + (1,) * x.ndim)
        return ops.cast(self._reduce(place * ops.expand_dims(ops.cast(x, ms.float32), 0)), x.dtype)


@ms.jit_class
class SingleRank:
    """Collectives of a group of one: nothing moves."""

    def __init__(self):
        self.rank = 0
        self.size = 1

    @property
    def traffic(self) -> traffic.Traffic:
        """What this process received, over all its groups."""
        return traffic.of_process()

    def all_gather(self, x: Tensor, purpose: str) -> Tensor:
        return ops.expand_dims(x, 0)

    def all_reduce(self, x: Tensor, purpose: str) -> Tensor:
        return x

    def all_to_all(self, x: Tensor, purpose: str, axis: int = 0) -> Tensor:
        return ops.transpose(x, _axis_first(axis, x.ndim))

    def has_point_to_point(self, compiled: bool) -> bool:
        return True


def _point_to_point():
    """``mint.distributed``, able to send and receive on this device.

    It looks its own rank up under the name that the world's group had when it was imported, the one of Ascend: on other devices that
    entry is missing and the look-up fails.
    """
    from mindspore.communication import get_rank
    from mindspore.mint.distributed import distributed

    distributed._GROUP_RANK_CACHE.setdefault("hccl_world_group", get_rank())
    return distributed


def _device_send(x: Tensor, world_rank: int) -> None:
    _point_to_point().send(x, world_rank)


def _device_recv(shape: tuple, world_rank: int) -> Tensor:
    received = Tensor(np.zeros(shape, np.float32))
    _point_to_point().recv(received, world_rank)
    return received
