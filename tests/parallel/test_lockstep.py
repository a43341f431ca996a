"""The lockstep harness itself: results in rank order, disagreements and failures reported."""

import numpy as np
import pytest
from mindspore import Tensor

from kcp.parallel import lockstep


def _ramp(group):
    return Tensor(np.full((2,), float(group.rank), np.float32))


def test_collectives_follow_their_definition():
    def body(group):
        c = group.collectives
        pieces, ramp = Tensor(np.arange(3, dtype=np.float32) + 10 * group.rank), _ramp(group)
        results = c.all_gather(ramp, "state"), c.all_reduce(ramp, "state"), c.all_to_all(pieces, "heads")
        return tuple(x.asnumpy() for x in results)

    for rank, (gathered, reduced, exchanged) in enumerate(lockstep.run(3, body)):
        np.testing.assert_array_equal(gathered, [[0, 0], [1, 1], [2, 2]])
        np.testing.assert_array_equal(reduced, [3, 3])
        np.testing.assert_array_equal(exchanged, [rank, 10 + rank, 20 + rank])


def test_ranks_that_disagree_about_a_collective_are_reported():
    def body(group):
        return group.collectives.all_gather(_ramp(group), "state") if group.rank else group.collectives.all_reduce(_ramp(group), "state")

    with pytest.raises(RuntimeError, match="ranks disagree about collective 1"):
        lockstep.run(2, body)


def test_a_rank_that_leaves_early_is_reported():
    def body(group):
        return None if group.rank == 1 else group.collectives.all_gather(_ramp(group), "state")

    with pytest.raises(RuntimeError, match="another rank finished without it"):
        lockstep.run(2, body)


def test_a_failing_rank_stops_the_others_and_its_error_comes_out():
    def body(group):
        if group.rank == 1:
            raise KeyError("bad data")
        return group.collectives.all_gather(_ramp(group), "state")

    with pytest.raises(KeyError, match="bad data"):
        lockstep.run(3, body)
