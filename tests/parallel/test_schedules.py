"""Schedules of chain and tree: what is sent, received and worked on agrees between ranks, and nobody waits without need."""

import itertools

import pytest

from kcp.parallel import chain
from kcp.parallel.chain import RECV, ROUND, SEND, WORK
from kcp.parallel.ptp_tree import tree_rounds

ROWS = [(0, 40), (0, 12, 12, 40), (0, 20, 40), (0, 3, 9, 25, 40)]
BORDERS = [(0, 10, 20, 30, 40), (0, 0, 20, 20, 40, 40), (0, 40), (0, 1, 2, 3, 39, 40)]


def _units(row, borders, rank, groups):
    begin, end = borders[rank], borders[rank + 1]
    parts = len(chain.split_slice(row, begin, end))
    return (parts,) * groups, (chain.crosses(row, begin),) * groups, (chain.crosses(row, end),) * groups


def _sent(schedule):
    """Units sent, in order, point to point or by rounds."""
    return [step[1] for step in schedule.steps if step[0] == SEND or (step[0] == ROUND and step[1] >= 0)]


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(("row", "borders"), list(itertools.product(ROWS, BORDERS)), ids=str)
def test_what_one_rank_sends_the_next_one_takes(row, borders, backward):
    size, groups = len(borders) - 1, 3
    direct, rounds = [], []
    for rank in range(size):
        units, enters, leaves = _units(row, borders, rank, groups)
        if backward:
            enters, leaves = leaves, enters
        direct.append(chain.direct(units, enters, leaves, backward))
        rounds.append(chain.rounds(units, enters, leaves, backward, size - 1 - rank if backward else rank, size))
        for schedule in (direct[-1], rounds[-1]):
            works = [step[1:3] for step in schedule.steps if step[0] == WORK]
            assert sorted(works) == sorted((u, p) for u in range(groups) for p in range(units[u]))
    order = range(size - 1, 0, -1) if backward else range(size - 1)
    for rank in order:
        following = rank - 1 if backward else rank + 1
        assert len(_sent(direct[rank])) == sum(step[0] == RECV for step in direct[following].steps)
        assert _sent(direct[rank]) == sorted(_sent(direct[rank]))
    for index in range(groups + size - 2):
        meeting = [[step for step in schedule.steps if step[0] == ROUND][index] for schedule in rounds]
        for rank in order:
            assert meeting[rank][1] == meeting[rank - 1 if backward else rank + 1][4]
    assert all(sum(step[0] == ROUND for step in schedule.steps) == groups + size - 2 for schedule in rounds)


def test_a_slice_whose_last_document_starts_in_it_sends_before_it_waits():
    units, enters, leaves = _units((0, 15, 40), (0, 10, 20, 40), 1, 4)
    kinds = [step[0] for step in chain.direct(units, enters, leaves, False).steps]
    assert units == (2,) * 4
    assert kinds == [WORK, SEND] * 4 + [RECV, WORK] * 4


def test_a_slice_between_documents_sends_and_waits_for_nothing():
    units, enters, leaves = _units((0, 10, 20, 40), (0, 10, 20, 40), 1, 2)
    assert [step[0] for step in chain.direct(units, enters, leaves, False).steps] == [WORK, WORK]


def test_a_slice_without_tokens_passes_on_what_comes():
    units, enters, leaves = _units((0, 40), (0, 20, 20, 40), 1, 2)
    assert chain.direct(units, enters, leaves, False).steps == ((RECV, -1), (SEND, 0, -1, 0), (RECV, -1), (SEND, 1, -1, 1))


def test_steps_by_hand():
    """One unit of two parts (1 is worked on and sent before the message for 0 comes), one of one part that passes on what it got."""
    both, none = (True, True), (False, False)
    forward = chain.direct((2, 1), both, both, False)
    assert forward.steps == (
        (WORK, 0, 1, -1), (SEND, 0, 0, -1), (RECV, -1), (WORK, 0, 0, 0), (RECV, -1), (WORK, 1, 0, 1), (SEND, 1, 2, -1),
    )  # fmt: skip
    assert (forward.places, forward.num_works) == (((1, 0), (2,)), 3)
    backward = chain.direct((2, 0), both, both, True)
    assert backward.steps == ((WORK, 0, 0, -1), (SEND, 0, 0, -1), (RECV, -1), (WORK, 0, 1, 0), (RECV, -1), (SEND, 1, -1, 1))
    assert (backward.places, backward.num_works) == (((0, 1), ()), 2)
    assert chain.direct((2,), none, none, False).steps == ((WORK, 0, 1, -1), (WORK, 0, 0, -1))
    middle = chain.rounds((1, 1), both, both, False, 1, 3)
    assert middle.steps == (
        (ROUND, -1, -1, -1, 0), (WORK, 0, 0, 0), (ROUND, 0, 0, -1, 1), (WORK, 1, 0, 1), (ROUND, 1, 1, -1, -1),
    )  # fmt: skip
    last = chain.rounds((2, 0), both, none, False, 2, 3)
    assert last.steps == ((ROUND, -1, -1, -1, -1), (ROUND, -1, -1, -1, 0), (WORK, 0, 1, -1), (WORK, 0, 0, 0), (ROUND, -1, -1, -1, 1))


def test_slices_and_borders_by_hand():
    row = (0, 12, 12, 40)
    assert [chain.crosses(row, border) for border in (0, 1, 11, 12, 13, 39, 40)] == [False, True, True, False, True, True, False]
    assert chain.split_slice(row, 5, 5) == ()
    assert chain.split_slice(row, 5, 20) == ((5, 12), (12, 20))
    for begin, end in ((0, 20), (5, 12), (12, 20), (13, 20), (5, 40)):
        assert chain.split_slice(row, begin, end) == ((begin, end),)


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8, 13, 64])
def test_tree_covers_every_earlier_rank_once_in_the_fewest_rounds(size):
    rounds = [tree_rounds(position, size) for position in range(size)]
    assert {len(r) for r in rounds} == {(size - 1).bit_length()}
    own = [{p} for p in range(size)]
    before: list[set] = [set() for _ in range(size)]
    for i in range(len(rounds[0])):
        sent = [set(s) for s in own]
        for position in range(size):
            target, sends_state, source, receives_state, _ = rounds[position][i]
            if target >= 0:
                assert rounds[target][i][2] == position
                assert sends_state == rounds[target][i][3] == (min(sent[position]) == 0)
            assert source >= 0 or not receives_state
            if source >= 0:
                assert not before[position] & sent[source]
                before[position] |= sent[source]
                own[position] |= sent[source]
    assert before == [set(range(position)) for position in range(size)]
