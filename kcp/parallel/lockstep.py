"""W ranks in one process, for tests and simulation: every rank runs as a thread, one at a time, and collectives are meetings.

A rank keeps the processor until it reaches a collective; there it leaves its tensor and hands over to the next rank. So MindSpore is never
entered by two threads at once. Code under test must call explicit forward and backward functions: ``ms.grad`` of one rank can't be
interrupted by another's.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import mindspore as ms
from mindspore import Tensor, ops

from kcp.parallel.group import CpGroup


class _Hub:
    """Where the ranks meet. The turn passes in rank order; meeting n is complete when the turn has gone once around."""

    def __init__(self, size: int):
        self.size = size
        self.turn = 0
        self.finished = [False] * size
        self.error: BaseException | None = None
        self.meetings: dict[int, dict[int, tuple[str, Any]]] = {}
        self.condition = threading.Condition()

    def wait_for_turn(self, rank: int) -> None:
        with self.condition:
            self.condition.wait_for(lambda: self.turn == rank or self.error is not None)
            if self.error is not None:
                raise RuntimeError(f"rank {rank} stops: another rank failed") from self.error

    def pass_turn(self, rank: int) -> None:
        with self.condition:
            waiting = [(rank + d) % self.size for d in range(1, self.size + 1) if not self.finished[(rank + d) % self.size]]
            if waiting:
                self.turn = waiting[0]
            self.condition.notify_all()

    def fail(self, error: BaseException) -> None:
        with self.condition:
            self.error = self.error or error
            self.condition.notify_all()

    def meet(self, rank: int, number: int, kind: str, value: Any) -> list[Any]:
        """Leave ``value`` at meeting ``number`` and come back with every rank's."""
        meeting = self.meetings.setdefault(number, {})
        meeting[rank] = (kind, value)
        self.pass_turn(rank)
        self.wait_for_turn(rank)
        if len(meeting) < self.size:
            raise RuntimeError(f"rank {rank} waits in {kind} but another rank finished without it")
        kinds = {kind for kind, _ in meeting.values()}
        if len(kinds) > 1:
            raise RuntimeError(f"ranks disagree about collective {number}: {sorted(kinds)}")
        return [meeting[r][1] for r in range(self.size)]


class LockstepCollectives:
    """The collectives of :mod:`kcp.parallel.collectives` for one rank of a lockstep run."""

    def __init__(self, hub: _Hub, rank: int):
        self.hub = hub
        self.rank = rank
        self.size = hub.size
        self.count = 0

    def _meet(self, kind: str, x: Tensor) -> list[Tensor]:
        self.count += 1
        return self.hub.meet(self.rank, self.count, f"{kind} {tuple(x.shape)} {x.dtype}", x)

    def all_gather(self, x: Tensor) -> Tensor:
        return ops.stack(tuple(self._meet("all_gather", x)), 0)

    def all_reduce(self, x: Tensor) -> Tensor:
        parts = self._meet("all_reduce", x)
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total

    def all_to_all(self, x: Tensor) -> Tensor:
        return ops.stack(tuple(part[self.rank] for part in self._meet("all_to_all", x)), 0)


def run(size: int, rank_function: Callable[[CpGroup], Any], slice_lengths: Sequence[int] | None = None) -> list[Any]:
    """Run ``rank_function(group)`` for every rank of a group of ``size`` and return the results in rank order.

    Raises:
        Whatever the first failing rank raised; RuntimeError if the ranks' collectives do not match.
    """
    hub = _Hub(size)
    results: list[Any] = [None] * size
    device = ms.get_context("device_target")

    def body(rank: int) -> None:
        try:
            hub.wait_for_turn(rank)
            ms.set_context(device_target=device)
            results[rank] = rank_function(CpGroup(rank, size, slice_lengths, LockstepCollectives(hub, rank)))
        except BaseException as error:
            hub.fail(error)
        finally:
            hub.finished[rank] = True
            hub.pass_turn(rank)

    threads = [threading.Thread(target=body, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if hub.error is not None:
        raise hub.error
    return results
