"""Hybrid: cp = Ulysses degree x scan degree, Ulysses inside (consecutive ranks), the state scan across.

    rank = block * degree + inner      inner group: the ranks of one block       outer group: the ranks of one ``inner``, block by block

Heads are exchanged within a block, so that each of its ranks holds the block's tokens and ``1 / degree`` of the heads; the states of those
heads are scanned over the blocks. It is Ulysses with a state scan for its local op.
"""

import mindspore as ms
from mindspore import ops

from kcp.parallel.group import CpGroup
from kcp.parallel.subgroups import part
from kcp.parallel.ulysses import Ulysses


def split_group(group: CpGroup, degree: int) -> tuple[CpGroup, CpGroup]:
    """``(inner, outer)`` groups of this rank; every rank of ``group`` must call it."""
    block, inner = group.rank // degree, group.rank % degree
    lengths = group.slice_lengths
    inside = None if lengths is None else lengths[block * degree : (block + 1) * degree]
    across = None if lengths is None else tuple(sum(lengths[b : b + degree]) for b in range(0, group.size, degree))
    return (
        part(group, range(block * degree, (block + 1) * degree), inside),
        part(group, range(inner, group.size, degree), across),
    )


@ms.jit_class
class Hybrid(Ulysses):
    """The strategy for KDA, explicit forward and backward.

    Args:
        opts: says which inputs are given and the public state's axes; without boundaries, which are the scan's.
        group: all ranks.
        inner: this rank's block.
        scan: a :class:`~kcp.parallel.state_scan.StateScan` over the outer group, on the block's tokens and the local heads; it leaves
            parameter gradients unreduced.
        reduced_by: who reduces the gradients of a_log and dt_bias.
        num_rows: B.
    """

    def __init__(self, opts, group, inner, scan, reduced_by, num_rows):
        super().__init__(opts, None, inner, reduced_by, num_rows)
        self.scan = scan
        self.everyone = group.collectives

    def _local_forward(self, inputs, cu, output_final_state):
        q, k, v, g, beta, a_log, dt_bias, initial_state = inputs
        q = ops.depend(q, beta)  # the scan's first exchange is tied to q, beta was exchanged last
        return self.scan.forward(q, k, v, g, beta, a_log, dt_bias, initial_state, cu, output_final_state)

    def _local_backward(self, inputs, cu, caches, d_out, d_final):
        q, k, v, g, beta, a_log, dt_bias, initial_state = inputs
        if d_out is not None:
            q = ops.depend(q, d_out)
        return self.scan.backward(q, k, v, g, beta, a_log, dt_bias, initial_state, cu, caches, d_out, d_final)
