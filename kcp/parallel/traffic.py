"""Counters of what the collectives receive, by purpose.

``logical`` bytes are what the exchange is for, as if the device had every collective; ``physical`` bytes are what the collectives that
served it were handed, more than that where one is emulated (on the CPU: all-to-all by all-gather, an all-gather within a sub-group by a
sum, point to point by rounds in a graph). Both count what one rank receives from the others:

    collective      logical                         physical
    all_gather      (W - 1) payload                 the same; W payloads of float32 in a sub-group on the CPU
    all_reduce      1 payload                       1 payload (how the library sums is its own affair)
    all_to_all      (W - 1) / W payload             on the CPU W - 1 payloads
    send, recv      1 payload at the receiver       the same
    round           1 payload, 0 without a source   W - 1 payloads, as its all-gather

Counting happens in PyNative and in lockstep runs. A compiled graph can't count its runs: there the record stays as it is, and
:mod:`kcp.parallel.plan` has the formulas.
"""

from dataclasses import dataclass

import mindspore as ms
from mindspore.ops import constexpr

STATE = "state"
HEADS = "heads"
HALO = "halo"
TOKENS = "tokens"
FINAL_STATE = "final_state"
INITIAL_STATE = "dh0"
PARAMETER = "parameter"
PURPOSES = (STATE, HEADS, HALO, TOKENS, FINAL_STATE, INITIAL_STATE, PARAMETER)


@dataclass
class Received:
    """What was received for one purpose.

    Attributes:
        exchanges: number of collective calls, whether or not they brought something.
        logical, physical: bytes, as the module says.
    """

    exchanges: int = 0
    logical: int = 0
    physical: int = 0


class Traffic:
    """A record of exchanges by purpose.

    Purposes: ``state`` (states and summaries between ranks), ``heads`` (Ulysses), ``halo``, ``tokens`` (a sequence gathered whole),
    ``final_state`` (and its gradient), ``dh0`` (the initial state's gradient), ``parameter`` (gradients of
    a_log and dt_bias; in lockstep also what the ranks compare).
    """

    def __init__(self):
        self._received = {purpose: Received() for purpose in PURPOSES}

    def add(self, purpose: str, logical: int, physical: int) -> None:
        """Count one exchange.

        Args:
            purpose: one of :data:`PURPOSES`.
            logical, physical: bytes received.

        Raises:
            ValueError: unknown purpose.
        """
        if purpose not in self._received:
            raise ValueError(f"purpose is {purpose!r}; allowed: {', '.join(PURPOSES)}")
        entry = self._received[purpose]
        entry.exchanges += 1
        entry.logical += logical
        entry.physical += physical

    def read(self) -> dict[str, Received]:
        """A copy of the counts, one entry for every purpose."""
        return {purpose: Received(r.exchanges, r.logical, r.physical) for purpose, r in self._received.items()}

    def logical(self, purpose: str | None = None) -> int:
        """Logical bytes received for a purpose; None: for all of them."""
        return sum(r.logical for name, r in self._received.items() if purpose in (None, name))

    def physical(self, purpose: str | None = None) -> int:
        """Physical bytes received for a purpose; None: for all of them."""
        return sum(r.physical for name, r in self._received.items() if purpose in (None, name))

    def reset(self) -> None:
        """Start again from zero."""
        self._received = {purpose: Received() for purpose in PURPOSES}


_process = Traffic()


def of_process() -> Traffic:
    """The record that this process's device collectives fill, of all groups together."""
    return _process


def payload_bytes(shape: tuple, dtype) -> int:
    """Bytes of a tensor of ``shape`` and MindSpore ``dtype``."""
    numbers = 1
    for n in shape:
        numbers *= n
    return numbers * dtype.itemsize


def probe() -> int:
    """Handed to :func:`count`; a graph that is being compiled turns it into None."""
    return 0


@constexpr(check=False)
def count(seen, purpose, shape, dtype, logical, physical, as_float32):
    """Add an exchange to the process's record, unless a graph is being compiled.

    Args:
        seen: :func:`probe`.
        shape, dtype: of one payload.
        logical, physical: how many payloads were received.
        as_float32: whether the payload physically travels as float32.
    """
    if seen is not None:
        size = payload_bytes(shape, dtype)
        wide = payload_bytes(shape, ms.float32) if as_float32 else size
        _process.add(purpose, logical * size, physical * wide)
    return 0
