"""The lockstep harness itself: results in rank order, disagreements and failures reported."""

import numpy as np
import pytest
from mindspore import Tensor

from kcp.parallel import lockstep
from kcp.parallel.hybrid import split_group


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


def test_messages_arrive_and_rounds_do_the_same():
    def body(group):
        c = group.collectives
        got = [c.recv((2,), source, "state").asnumpy() for source in range(group.rank)]
        for target in range(group.rank + 1, 3):
            c.send(_ramp(group), target, "state")
        return got, c.round(_ramp(group), (group.rank + 1) % 3, "state").asnumpy()

    for rank, (got, after) in enumerate(lockstep.run(3, body)):
        assert [x.tolist() for x in got] == [[source] * 2 for source in range(rank)]
        np.testing.assert_array_equal(after, [(rank + 1) % 3] * 2)


def test_point_to_point_unless_it_is_refused():
    for arguments, expected in (((), True), ((None, False), False)):
        assert lockstep.run(2, lambda group: group.collectives.has_point_to_point(False), *arguments) == [expected] * 2


def _send(c, target):
    return c.send(_ramp(c), target, "state")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (lambda c: c.recv((3,), 0, "state") if c.rank else _send(c, 1), r"rank 0 sends \(2,\).* where rank 1 expects \(3,\)"),
        (lambda c: c.recv((2,), 1 - c.rank, "state"), "0 waits in recv .* from rank 1, rank 1 waits in recv .* rank 0: no rank can go on"),
        (lambda c: _send(c, 1 - c.rank), "no rank can go on"),
        (lambda c: None if c.rank else _send(c, 1), "rank 0 waits in send .* to rank 1 but another rank finished"),
        (lambda c: c.all_reduce(_ramp(c), "state") if c.rank else _send(c, 1), "rank 1 waits in all_reduce .*: no rank can go on"),
    ],
    ids=["shapes", "both-receive", "both-send", "never-taken", "send-meets-collective"],
)
def test_messages_that_do_not_match_are_reported(body, words):
    with pytest.raises(RuntimeError, match=words):
        lockstep.run(2, lambda group: body(group.collectives))


def test_groups_within_a_group():
    def body(group):
        inner, outer = split_group(group, 2)
        gathered = [g.collectives.all_gather(_ramp(group), "state").asnumpy()[:, 0].tolist() for g in (inner, outer)]
        return gathered, inner.lengths(0), outer.lengths(0)

    results = lockstep.run(6, body, (1, 2, 3, 4, 5, 6))
    assert results[3] == ([[2, 3], [1, 3, 5]], (3, 4), (3, 7, 11))
    assert results[4][0] == [[4, 5], [0, 2, 4]]
