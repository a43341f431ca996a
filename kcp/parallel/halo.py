"""ShortConv halo: the kernel-1 tokens before a rank's slice, from one or several earlier ranks, and their gradient back to the owners.

Every rank offers its last kernel-1 tokens (fewer if its slice is shorter); an all-gather brings all tails, and each rank keeps the newest
kernel-1 tokens before its own slice, zeros before the sequence's start. The adjoint adds a halo's gradient to the tail it came from.
"""

from mindspore import Tensor, nn, ops
from mindspore.ops import constexpr

from kcp.parallel.traffic import HALO


def _tail(x: Tensor, halo: int) -> Tensor:
    """Last ``halo`` tokens of ``[B, T, D]``, zeros in front if there are fewer: ``[B, halo, D]``."""
    missing = halo - x.shape[1]
    if missing <= 0:
        return x[:, x.shape[1] - halo :]
    return ops.concat((ops.zeros((x.shape[0], missing, x.shape[2]), x.dtype), x), 1)


@constexpr
def halo_sources(lengths: tuple, rank: int, halo: int) -> tuple:
    """Where a rank's halo comes from: runs ``(source rank, first token of its tail, number of tokens, first halo position)``.

    Tails are right-aligned ``halo`` tokens of every rank, and a run reaches to its tail's end; halo positions count from 0 (oldest) to
    halo - 1 (the token before the slice).
    """
    return _sources(lengths, rank, halo)


def _sources(lengths, rank, halo):
    runs, free = [], halo
    for source in range(rank - 1, -1, -1):
        count = min(free, lengths[source])
        if count > 0:
            runs.append((source, halo - count, count, free - count))
            free -= count
    return tuple(runs)


@constexpr
def halo_debts(lengths: tuple, rank: int, halo: int) -> tuple:
    """Where this rank's tail went: runs ``(later rank, first token of the tail, number of tokens, first halo position there)``."""
    debts = []
    for later in range(rank + 1, len(lengths)):
        for source, first, count, position in _sources(lengths, later, halo):
            if source == rank:
                debts.append((later, first, count, position))
    return tuple(debts)


class Halo(nn.Cell):
    """``[B, T_local, D] -> [B, halo, D]``, the ``halo`` tokens before this rank's slice; differentiable.

    Args:
        group: the :class:`~kcp.parallel.group.CpGroup`.
        halo: kernel size - 1.
    """

    def __init__(self, group, halo: int):
        super().__init__(auto_prefix=False)
        self.group = group
        self.halo = halo

    def construct(self, x):
        return self.forward(x)

    def bprop(self, x, out, dout):
        return (self.backward(x, ops.depend(dout, out)),)

    def forward(self, x):
        """The halo of this rank."""
        tails = self.group.collectives.all_gather(_tail(x, self.halo), HALO)
        runs = halo_sources(self.group.lengths(x.shape[1]), self.group.rank, self.halo)
        parts, filled = [], 0
        for i in range(len(runs)):
            source, first, count, _ = runs[len(runs) - 1 - i]
            parts.append(tails[source][:, first:])
            filled += count
        if filled < self.halo:
            zeros = ops.zeros((x.shape[0], self.halo - filled, x.shape[2]), x.dtype)
            parts = [ops.depend(zeros, tails)] + parts
        return ops.concat(tuple(parts), 1) if len(parts) > 1 else parts[0]

    def backward(self, x, d_halo):
        """Gradient of x ``[B, T_local, D]``: what later ranks' halos owe to this rank's last tokens."""
        gathered = self.group.collectives.all_gather(d_halo, HALO)
        owed = halo_debts(self.group.lengths(x.shape[1]), self.group.rank, self.halo)
        d_tail = ops.depend(ops.zeros((x.shape[0], self.halo, x.shape[2]), x.dtype), gathered)
        for i in range(len(owed)):
            later, first, count, position = owed[i]
            parts = [gathered[later][:, position : position + count]]
            if first > 0:
                parts = [ops.zeros((x.shape[0], first, x.shape[2]), x.dtype)] + parts
            d_tail = d_tail + (ops.concat(tuple(parts), 1) if len(parts) > 1 else parts[0])
        if x.shape[1] <= self.halo:
            return d_tail[:, self.halo - x.shape[1] :]
        return ops.concat((ops.zeros((x.shape[0], x.shape[1] - self.halo, x.shape[2]), x.dtype), d_tail), 1)
