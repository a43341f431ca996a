"""Gradients of tensors that every CP rank holds whole.

``a_log`` and ``dt_bias`` (as every replicated parameter) get a partial gradient on each rank, from that rank's tokens or heads. The sum
over the group is taken exactly once, by whom ``reduce_replicated_grads`` says: ``"trainer"`` (kcp leaves partial sums) or ``"kcp"``.
States follow one convention: a final state is the same on every rank and its gradient is the sum of what the ranks put in; an initial
state's gradient comes back whole on every rank.
"""

from mindspore import ops

from kcp.parallel.traffic import PARAMETER

REDUCE_CHOICES = ("trainer", "kcp")


def reduce_gate_parameters(opts, da_log, ddt_bias, dq, collectives, reduced_by: str):
    """Gradients of a_log and dt_bias: whole on every rank if kcp reduces, else this rank's part.

    Returns:
        ``(da_log, ddt_bias, dq)``; dq is tied to the reductions, so that what is exchanged after it comes after them in a graph too.
    """
    if reduced_by != "kcp":
        return da_log, ddt_bias, dq
    if opts.has_a_log:
        da_log = collectives.all_reduce(ops.depend(da_log, dq), PARAMETER)
        dq = ops.depend(dq, da_log)
    if opts.has_dt_bias:
        ddt_bias = collectives.all_reduce(ops.depend(ddt_bias, dq), PARAMETER)
        dq = ops.depend(dq, ddt_bias)
    return da_log, ddt_bias, dq
