"""PTP scan as a tree: the summaries of the state scan, combined in ceil(log2 W) rounds of point to point.

At distance d = 1, 2, 4, ... a rank sends the summary of its last d ranks (itself included) to the rank d ahead, and takes that of the d
ranks before them: after the last round it knows all earlier ranks. A summary that reaches back to the first rank is a known state, E alone
(K V numbers a head); the others are ``[E | M]`` (K (V + K)). The backward does the same against time with ``[dE | dM]``: the products it
needs are of other ranks' transitions, so dM travels even where each rank kept its own M. With ``keep_transitions`` dM is that M
transposed, and only dE is computed.

In graph mode there is no point to point: each of the ceil(log2 W) exchanges is a round of all ranks with ``[E | M]``.
"""

import mindspore as ms
from mindspore import ops

from kcp.parallel import summary
from kcp.parallel.degrees import tree_rounds
from kcp.parallel.state_scan import StateScan
from kcp.parallel.traffic import STATE


def _compose(later, earlier):
    """Summary or state of ``earlier``, then ``later``; what ``earlier`` is, the result is."""
    whole = earlier.shape[-1] == summary.split(later)[0].shape[-1]
    return summary.apply(later, earlier) if whole else summary.compose(later, earlier)


@ms.jit_class
class PtpTree(StateScan):
    """The strategy for KDA, explicit forward and backward.

    Args:
        point_to_point: whether the ranks can send and receive; else they go by rounds.
        The others: as :class:`~kcp.parallel.state_scan.StateScan`.
    """

    def __init__(self, opts, backend, group, documents, reduced_by, has_initial_state, state_v_first, keep_transitions, point_to_point):
        super().__init__(opts, backend, group, documents, reduced_by, has_initial_state, state_v_first, keep_transitions)
        self.point_to_point = point_to_point
        self.forward_rounds = tree_rounds(group.rank, group.size)
        self.backward_rounds = tree_rounds(group.size - 1 - group.rank, group.size)

    def _combine(self, own, value_width, rounds, backward):
        """``(state from all earlier positions, what later exchanges are tied to)``; own ``[B, H, K, V + K]``."""
        collectives, last = self.group.collectives, self.group.size - 1
        mine, before, tied = own, None, own
        for target, sends_state, source, receives_state, goes_on in rounds:
            to, origin = (last - target, last - source) if backward else (target, source)
            arrived = None
            if self.point_to_point:
                if target >= 0:
                    collectives.send(mine[..., :value_width] * 1.0 if sends_state else mine, to, STATE)
                if source >= 0:
                    shape = own.shape[:-1] + (value_width if receives_state else own.shape[-1],)
                    arrived = collectives.recv(shape, origin, STATE)
            else:
                payload = mine
                if mine.shape[-1] == value_width:
                    payload = ops.concat((mine, ops.zeros(own[..., value_width:].shape, ms.float32)), -1)
                tied = collectives.round(ops.depend(payload, tied), origin if source >= 0 else self.group.rank, STATE)
                arrived = tied[..., :value_width] if receives_state else tied
            if source >= 0:
                before = arrived if before is None else _compose(before, arrived)
                if goes_on:
                    mine = _compose(mine, arrived)
        return (own[..., :value_width] if before is None else before), tied

    def _exchange_forward(self, own, value_width):
        crossing, tied = self._combine(own, value_width, self.forward_rounds, False)
        return crossing, own[..., value_width:] * 1.0, tied

    def _exchange_backward(self, own, transitions, value_width):
        if transitions is not None:
            own = ops.concat((own, ops.swapaxes(transitions, -1, -2)), -1)
        return self._combine(own, value_width, self.backward_rounds, True)
