"""The schedule of a chain of ranks that pass states on: who works on what, and sends or waits for what, in which order.

A unit is one row of the batch and one group of heads; units are independent, so rank 1 works on unit 0 while rank 0 works on unit 1. A
slice of a row is one part, or two if a document ends in it and another one, which started in it, goes on: what leaves the slice then does
not depend on what enters it, and is sent first. ``position`` counts ranks from the chain's start: rank order in the forward, the reverse in
the backward.
"""

from dataclasses import dataclass

import mindspore as ms

WORK, SEND, RECV, ROUND = range(4)


def split_slice(row: tuple, begin: int, end: int) -> tuple[tuple[int, int], ...]:
    """The parts ``(begin, end)`` of a slice of a row with document boundaries ``row``: none, one or two."""
    if begin == end:
        return ()
    first_end = min(stop for stop in row if stop > begin)
    if crosses(row, begin) and crosses(row, end) and first_end < end:
        return (begin, first_end), (first_end, end)
    return ((begin, end),)


def crosses(row: tuple, border: int) -> bool:
    """Whether a document goes on across ``border``."""
    return 0 < border < row[-1] and border not in row


@ms.jit_class
@dataclass(frozen=True)
class Schedule:
    """What one rank does, as steps ``(kind, unit, ...)``.

    - ``(WORK, unit, part, arrival)``: run the local op; ``arrival`` numbers the message that enters it (-1: none);
    - ``(SEND, unit, work, arrival)``: pass on what step of work number ``work`` gave, or message ``arrival`` as it came;
    - ``(RECV, -1)``: take the next message;
    - ``(ROUND, unit, work, arrival, received)``: send as above (unit -1: nothing) and receive that unit's message (-1: nothing).

    Attributes:
        steps: in order.
        places: for every unit its parts' numbers of work, in the order of time.
        num_works: how often the local op runs.
    """

    steps: tuple
    places: tuple
    num_works: int


class _Builder:
    """Collects the steps of a schedule; works and messages get their numbers here."""

    def __init__(self, parts: tuple, entered: int, leaving: int):
        self.parts = parts
        self.entered, self.leaving = entered, leaving
        self.steps: list[tuple] = []
        self.works: dict[tuple[int, int], int] = {}
        self.arrivals: dict[int, int] = {}

    def work(self, unit: int, part: int) -> None:
        if (unit, part) not in self.works:
            arrival = self.arrivals.get(unit, -1) if part == self.entered % self.parts[unit] else -1
            self.works[unit, part] = len(self.works)
            self.steps.append((WORK, unit, part, arrival))

    def work_all(self, unit: int) -> None:
        """All parts, the one that the next rank waits for first."""
        if self.parts[unit]:
            self.work(unit, self.leaving % self.parts[unit])
            self.work(unit, self.entered % self.parts[unit])

    def source(self, unit: int) -> tuple[int, int]:
        """``(work, arrival)``: where what leaves the unit comes from."""
        if self.parts[unit] == 0:
            return -1, self.arrivals[unit]
        return self.works[unit, self.leaving % self.parts[unit]], -1

    def receive(self, unit: int) -> None:
        self.arrivals[unit] = len(self.arrivals)

    def schedule(self) -> Schedule:
        places = tuple(tuple(self.works[unit, part] for part in range(count)) for unit, count in enumerate(self.parts))
        return Schedule(tuple(self.steps), places, len(self.works))


def direct(parts: tuple, enters: tuple, leaves: tuple, backward: bool) -> Schedule:
    """The schedule where point to point exists.

    Args:
        parts: number of parts of every unit.
        enters, leaves: whether a message enters and leaves this rank for every unit.
        backward: the chain runs against time: a message enters a unit's last part and leaves from its first one.
    """
    b = _Builder(parts, -1 if backward else 0, 0 if backward else -1)
    waiting: list[int] = []

    def catch_up() -> None:
        for unit in waiting:
            b.receive(unit)
            b.steps.append((RECV, -1))
            b.work_all(unit)
        waiting.clear()

    for unit, count in enumerate(parts):
        if count == 2 and enters[unit] and leaves[unit]:
            b.work(unit, b.leaving % 2)
            b.steps.append((SEND, unit, *b.source(unit)))
            waiting.append(unit)
            continue
        if enters[unit]:
            catch_up()  # messages of one sender are taken in the order of their units
            b.receive(unit)
            b.steps.append((RECV, -1))
        b.work_all(unit)
        if leaves[unit]:
            b.steps.append((SEND, unit, *b.source(unit)))
    catch_up()
    return b.schedule()


def rounds(parts: tuple, enters: tuple, leaves: tuple, backward: bool, position: int, size: int) -> Schedule:
    """The schedule in rounds of all ranks, ``units + size - 2`` of them: at round t the rank at position p sends unit t - p.

    Arguments as in :func:`direct`.
    """
    b = _Builder(parts, -1 if backward else 0, 0 if backward else -1)
    num_rounds = len(parts) + size - 2
    for t in range(num_rounds + 1):
        unit = t - position
        active = 0 <= unit < len(parts)
        if active:
            b.work_all(unit)
        if t == num_rounds:
            break
        sent = (unit, *b.source(unit)) if active and leaves[unit] else (-1, -1, -1)
        received = unit + 1 if 0 <= unit + 1 < len(parts) and enters[unit + 1] else -1
        b.steps.append((ROUND, *sent, received))
        if received >= 0:
            b.receive(received)
    return b.schedule()
