"""Gradients of tensors that every CP rank holds whole.

``a_log`` and ``dt_bias`` (as every replicated parameter) get a partial gradient on each rank, from that rank's tokens or heads. The sum
over the group is taken exactly once, by whom ``reduce_replicated_grads`` says: ``"trainer"`` (kcp leaves partial sums) or ``"kcp"``.
States follow one convention: a final state is the same on every rank and its gradient is the sum of what the ranks put in; an initial
state's gradient comes back whole on every rank.
"""

from mindspore import Tensor

REDUCE_CHOICES = ("trainer", "kcp")


def reduce_parameter(grad: Tensor, collectives, reduced_by: str) -> Tensor:
    """A replicated parameter's gradient: whole on every rank if kcp reduces, else this rank's part."""
    return collectives.all_reduce(grad) if reduced_by == "kcp" else grad


def contribute(value: Tensor, collectives, from_rank: int) -> Tensor:
    """``value`` of one rank on every rank: zero elsewhere, then all-reduced (first-rank dh0, last-rank final state)."""
    return collectives.all_reduce(value if collectives.rank == from_rank else value * 0.0)
