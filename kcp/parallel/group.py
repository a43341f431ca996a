"""CpGroup: the ranks among which every sequence is sliced, rank order = time order."""

from collections.abc import Sequence

import mindspore as ms

from kcp.parallel.collectives import Collectives, SingleRank
from kcp.parallel.traffic import Traffic


@ms.jit_class
class CpGroup:
    """A context-parallel group as seen by one rank.

    Args:
        rank: this rank, 0 to size - 1; rank order is time order.
        size: number of ranks.
        slice_lengths: tokens of every rank's slice (host integers); None: all slices are equally long.
        collectives: how the ranks talk; default: the world of MindSpore's communication.

    Raises:
        ValueError, TypeError: naming the argument, what it got and what is allowed.
    """

    def __init__(self, rank: int, size: int, slice_lengths: Sequence[int] | None = None, collectives=None):
        for name, value in (("rank", rank), ("size", size)):
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} is {value!r} of type {type(value).__name__}; allowed: an integer")
        if size < 1:
            raise ValueError(f"size is {size}; allowed: at least 1")
        if not 0 <= rank < size:
            raise ValueError(f"rank is {rank}; allowed: 0 to {size - 1}")
        if slice_lengths is not None:
            slice_lengths = tuple(slice_lengths)
            if len(slice_lengths) != size or any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in slice_lengths):
                raise ValueError(f"slice_lengths is {slice_lengths!r}; allowed: {size} integers >= 0, one a rank")
        if collectives is None:
            collectives = SingleRank() if size == 1 else Collectives(rank, size)
        self.rank = rank
        self.size = size
        self.slice_lengths = slice_lengths
        self.longest_slice = max(slice_lengths) if slice_lengths else 0
        self.collectives = collectives

    @property
    def traffic(self) -> Traffic:
        """Bytes received by this rank, by purpose (PyNative and lockstep runs; see :mod:`kcp.parallel.traffic`)."""
        return self.collectives.traffic

    @staticmethod
    def single() -> "CpGroup":
        """The group of one rank: no context parallelism."""
        return CpGroup(0, 1)

    @staticmethod
    def world(slice_lengths: Sequence[int] | None = None) -> "CpGroup":
        """All processes of the launch (``mindspore.communication.init`` must have run if there are several)."""
        from mindspore.communication import GlobalComm, get_group_size, get_rank

        if not GlobalComm.INITED:
            return CpGroup(0, 1, slice_lengths)
        return CpGroup(get_rank(), get_group_size(), slice_lengths)

    def lengths(self, local_tokens: int) -> tuple:
        """Tokens of every rank's slice, given this rank's."""
        if self.slice_lengths is None:
            return (local_tokens,) * self.size
        return self.slice_lengths

    def longest(self, local_tokens: int) -> int:
        """Tokens of the longest slice, given this rank's."""
        return local_tokens if self.slice_lengths is None else self.longest_slice

    def slice_bounds(self, num_tokens: int) -> tuple[int, int]:
        """``(begin, end)`` of this rank's slice of a sequence of ``num_tokens``.

        Raises:
            ValueError: equal slices are asked for and ``num_tokens`` does not divide, or the slices do not add up to it.
        """
        if self.slice_lengths is None:
            if num_tokens % self.size:
                raise ValueError(
                    f"num_tokens is {num_tokens}; allowed: a multiple of the group's size {self.size}, or slice_lengths given to CpGroup"
                )
            return self.rank * (num_tokens // self.size), (self.rank + 1) * (num_tokens // self.size)
        if sum(self.slice_lengths) != num_tokens:
            raise ValueError(f"slice_lengths {self.slice_lengths} add up to {sum(self.slice_lengths)}; allowed: num_tokens={num_tokens}")
        begin = sum(self.slice_lengths[: self.rank])
        return begin, begin + self.slice_lengths[self.rank]
