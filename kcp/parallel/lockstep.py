"""W ranks in one process, for tests and simulation: every rank runs as a thread, one at a time, and collectives are meetings.

A rank keeps the processor until it reaches a collective; there it leaves its tensor and hands over to the next rank that can go on. A send
ends when its message was taken (a rendezvous). So MindSpore is never entered by two threads at once. Code under test must call explicit
forward and backward functions: ``ms.grad`` of one rank can't be interrupted by another's.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import mindspore as ms
from mindspore import Tensor, ops

from kcp.parallel.group import CpGroup
from kcp.parallel.traffic import Traffic, payload_bytes


class _Hub:
    """Where the ranks meet and whose turn it is: the turn passes to the next rank, in rank order, that has something to do."""

    def __init__(self, size: int):
        self.size = size
        self.turn = 0
        self.finished = [False] * size
        self.waits: list[tuple[Callable[[], bool], str] | None] = [None] * size
        self.error: BaseException | None = None
        self.meetings: dict[Any, dict[int, tuple[str, Any]]] = {}
        self.messages: dict[Any, tuple[str, Any]] = {}
        self.condition = threading.Condition()

    def wait_for_turn(self, rank: int) -> None:
        with self.condition:
            self.condition.wait_for(lambda: self.turn == rank or self.error is not None)
            if self.error is not None:
                raise RuntimeError(f"rank {rank} stops: another rank failed") from self.error

    def pass_turn(self, rank: int) -> None:
        with self.condition:
            others = [(rank + d) % self.size for d in range(1, self.size + 1)]
            ready = [r for r in others if not self.finished[r] and (self.waits[r] is None or self.waits[r][0]())]
            if ready:
                self.turn = ready[0]
            elif not all(self.finished):
                self.error = self.error or RuntimeError(self._standstill())
            self.condition.notify_all()

    def _standstill(self) -> str:
        waiting = [f"rank {r} waits in {self.waits[r][1]}" for r in range(self.size) if not self.finished[r]]
        end = " but another rank finished without it" if any(self.finished) else ": no rank can go on"
        return ", ".join(waiting) + end

    def wait(self, rank: int, ready: Callable[[], bool], what: str) -> None:
        """Hand the turn over until ``ready()``."""
        self.waits[rank] = (ready, what)
        self.pass_turn(rank)
        self.wait_for_turn(rank)
        self.waits[rank] = None

    def fail(self, error: BaseException) -> None:
        with self.condition:
            self.error = self.error or error
            self.condition.notify_all()

    def meet(self, members: tuple, rank: int, number: int, kind: str, value: Any) -> list[Any]:
        """Leave ``value`` at the members' meeting ``number`` and come back with every member's."""
        meeting = self.meetings.setdefault((members, number), {})
        meeting[rank] = (kind, value)
        self.wait(rank, lambda: len(meeting) == len(members), kind)
        self.meetings.pop((members, number), None)  # complete: whoever comes back first clears the place
        kinds = {kind for kind, _ in meeting.values()}
        if len(kinds) > 1:
            raise RuntimeError(f"ranks disagree about collective {number}: {sorted(kinds)}")
        return [meeting[r][1] for r in members]

    def send(self, rank: int, target: int, kind: str, value: Any) -> None:
        """Offer ``value`` to ``target`` and wait until it is taken."""
        self.messages[rank, target] = (kind, value)
        self.wait(rank, lambda: (rank, target) not in self.messages, f"send {kind} to rank {target}")

    def recv(self, rank: int, source: int, kind: str) -> Any:
        """Wait for what ``source`` offers this rank and take it."""
        self.wait(rank, lambda: (source, rank) in self.messages, f"recv {kind} from rank {source}")
        sent, value = self.messages.pop((source, rank))
        if sent != kind:
            raise RuntimeError(f"rank {source} sends {sent} where rank {rank} expects {kind}")
        return value


def _stacked(parts: Sequence[Any]) -> Any:
    """``[len(parts), ...]``; Stack lacks bfloat16 on the CPU, Concat has it."""
    return ops.concat(tuple(ops.expand_dims(part, 0) for part in parts), 0)


class LockstepCollectives:
    """The collectives of :mod:`kcp.parallel.collectives` for one rank of a lockstep run.

    Args:
        hub: where all ranks of the run meet.
        rank: this rank within the group.
        members: the group's ranks in the run; None: all of them.
        point_to_point: False: behave as in a graph, where point to point goes by rounds.
        traffic: record that this rank fills; None: a new one. Rounds alone move more than their payload here.
    """

    def __init__(
        self,
        hub: _Hub,
        rank: int,
        members: Sequence[int] | None = None,
        point_to_point: bool = True,
        traffic: Traffic | None = None,
    ):
        self.hub = hub
        self.rank = rank
        self.members = tuple(range(hub.size) if members is None else members)
        self.size = len(self.members)
        self.point_to_point = point_to_point
        self.count = 0
        self.traffic = Traffic() if traffic is None else traffic

    def _meet(self, kind: str, x: Tensor) -> list[Tensor]:
        self.count += 1
        return self.hub.meet(self.members, self.members[self.rank], self.count, f"{kind} {tuple(x.shape)} {x.dtype}", x)

    def _received(self, purpose: str, shape: tuple, dtype, logical: int, physical: int) -> None:
        size = payload_bytes(shape, dtype)
        self.traffic.add(purpose, logical * size, physical * size)

    def all_gather(self, x: Tensor, purpose: str) -> Tensor:
        self._received(purpose, x.shape, x.dtype, self.size - 1, self.size - 1)
        return _stacked(self._meet("all_gather", x))

    def all_reduce(self, x: Tensor, purpose: str) -> Tensor:
        self._received(purpose, x.shape, x.dtype, 1, 1)
        parts = self._meet("all_reduce", x)
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total

    def all_to_all(self, x: Tensor, purpose: str, axis: int = 0) -> Tensor:
        x = ops.movedim(x, axis, 0)
        self._received(purpose, x.shape[1:], x.dtype, self.size - 1, self.size - 1)
        return ops.concat(tuple(part[self.rank : self.rank + 1] for part in self._meet("all_to_all", x)), 0)

    def has_point_to_point(self, compiled: bool) -> bool:
        return self.point_to_point

    def send(self, x: Tensor, target: int, purpose: str) -> None:
        self._received(purpose, x.shape, x.dtype, 0, 0)
        self.hub.send(self.members[self.rank], self.members[target], f"{tuple(x.shape)} {x.dtype}", x)

    def recv(self, shape: tuple, source: int, purpose: str) -> Tensor:
        self._received(purpose, shape, ms.float32, 1, 1)
        return self.hub.recv(self.members[self.rank], self.members[source], f"{tuple(shape)} {ms.float32}")

    def round(self, x: Tensor, source: int, purpose: str) -> Tensor:
        self._received(purpose, x.shape, x.dtype, int(source != self.rank), self.size - 1)
        return self._meet("round", x)[source]

    def subgroup(self, ranks: Sequence[int]) -> "LockstepCollectives":
        members = [self.members[r] for r in ranks]
        return LockstepCollectives(self.hub, list(ranks).index(self.rank), members, self.point_to_point, self.traffic)


def run(
    size: int, rank_function: Callable[[CpGroup], Any], slice_lengths: Sequence[int] | None = None, point_to_point: bool = True
) -> list[Any]:
    """Run ``rank_function(group)`` for every rank of a group of ``size`` and return the results in rank order.

    ``point_to_point=False`` takes the schedules that graphs take, where point to point goes by rounds of all ranks.

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
            results[rank] = rank_function(CpGroup(rank, size, slice_lengths, LockstepCollectives(hub, rank, point_to_point=point_to_point)))
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
