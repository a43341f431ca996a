"""CpGroup: slices and its errors; KdaCore's refusals."""

import numpy as np
import pytest
from mindspore import Tensor

from kcp import config
from kcp.layers import KdaCore, KdaCoreConfig
from kcp.parallel import ContextParallel, CpGroup, lockstep
from kcp.parallel.collectives import SingleRank
from kcp.parallel.lockstep import LockstepCollectives, _Hub
from kcp.parallel.strategies import STRATEGIES
from kcp.parallel.subgroups import context_parallel_group, part


def _group(rank=0, size=2, slice_lengths=None):
    return CpGroup(rank, size, slice_lengths, LockstepCollectives(_Hub(size), rank))


def _hybrid(size, degree):
    return KdaCore(KdaCoreConfig(num_heads=2, strategy="hybrid", hybrid_ulysses_degree=degree), _group(0, size))


def test_slice_bounds():
    assert [_group(r, 3).slice_bounds(12) for r in range(3)] == [(0, 4), (4, 8), (8, 12)]
    assert [_group(r, 3, (5, 0, 2)).slice_bounds(7) for r in range(3)] == [(0, 5), (5, 5), (5, 7)]
    assert CpGroup.single().slice_bounds(7) == (0, 7)


def test_groups_of_one():
    for group in (CpGroup.single(), CpGroup.world(), CpGroup.world((7,)), context_parallel_group(1)):
        assert (group.rank, group.size, isinstance(group.collectives, SingleRank)) == (0, 1, True)
        assert group.lengths(7) == (7,) and group.longest(7) == 7 and group.traffic is group.collectives.traffic
    with pytest.raises(ValueError, match="context_parallel_size: 2 is not supported; the launch has 1 ranks"):
        context_parallel_group(2)


def test_lengths_of_slices():
    assert (_group(1, 3).lengths(4), _group(1, 3).longest(4)) == ((4, 4, 4), 4)
    assert (_group(1, 3, (5, 0, 2)).lengths(0), _group(1, 3, (5, 0, 2)).longest(0)) == ((5, 0, 2), 5)


def test_groups_that_share_a_launch(monkeypatch):
    """Three groups of two among six ranks; one of all six is the launch itself."""

    def body(world):
        monkeypatch.setattr(CpGroup, "world", staticmethod(lambda: world))
        pair, whole = context_parallel_group(2), context_parallel_group(6)
        with pytest.raises(ValueError, match="context_parallel_size: 4 is not supported; the launch has 6 ranks"):
            context_parallel_group(4)
        gathered = pair.collectives.all_gather(Tensor(np.array(world.rank, np.int32)), "state").asnumpy().tolist()
        return (pair.rank, pair.size), (whole.rank, whole.size), gathered, whole.collectives is world.collectives

    for rank, found in enumerate(lockstep.run(6, body)):
        first = rank // 2 * 2
        assert found == ((rank % 2, 2), (rank, 6), [first, first + 1], True)


def test_parts_of_a_group():
    """A part of one rank talks to nobody; its slice is what it was given."""

    def body(group):
        alone = part(group, range(group.rank, group.rank + 1), (group.rank,))
        every_other = part(group, range(group.rank % 2, 4, 2), (1, 2))
        return alone.lengths(0), isinstance(alone.collectives, SingleRank), every_other.rank, every_other.lengths(0)

    assert lockstep.run(4, body) == [((rank,), True, rank // 2, (1, 2)) for rank in range(4)]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: _group(2, 2), ["rank is 2", "0 to 1"]),
        (lambda: CpGroup(0, 0), ["size is 0", "at least 1"]),
        (lambda: _group(-1, 2), ["rank is -1", "0 to 1"]),
        (lambda: CpGroup(True, 2), ["rank is True", "an integer"]),
        (lambda: CpGroup(0, 2.0), ["size is 2.0", "an integer"]),
        (lambda: _group(0, 2, (1,)), ["slice_lengths is (1,)", "2 integers"]),
        (lambda: _group(0, 2, (1, True)), ["slice_lengths is (1, True)", "2 integers"]),
        (lambda: _group(0, 2, (1, 2.0)), ["slice_lengths is (1, 2.0)", "2 integers"]),
        (lambda: _group(0, 2, (1, 2, 3)), ["slice_lengths is (1, 2, 3)", "2 integers"]),
        (lambda: _group(0, 2, (1, -2)), ["slice_lengths is (1, -2)", ">= 0"]),
        (lambda: _group(0, 2).slice_bounds(7), ["num_tokens is 7", "multiple of the group's size 2"]),
        (lambda: _group(0, 2, (3, 3)).slice_bounds(7), ["add up to 6", "num_tokens=7"]),
        (lambda: KdaCoreConfig(num_heads=4, num_v_heads=6), ["num_v_heads is 6", "multiple of num_heads=4"]),
        (lambda: KdaCoreConfig(num_heads=4, head_dim=300), ["head_dim is 300", "<= 256"]),
        (lambda: KdaCoreConfig(num_heads=4, strategy="ring"), ["strategy is 'ring'", "'state_scan'"]),
        (lambda: KdaCoreConfig(num_heads=4, lower_bound=-9.0), ["lower_bound is -9.0", "[-5, 0)"]),
        (lambda: KdaCoreConfig(num_heads=4, reduce_replicated_grads="both"), ["reduce_replicated_grads is 'both'", "'trainer', 'kcp'"]),
        (lambda: KdaCore(KdaCoreConfig(num_heads=4), _group()), ["strategy is 'none'", "2 ranks", "'ulysses'"]),
        (lambda: KdaCoreConfig(num_heads=4, ptp_head_groups=3), ["ptp_head_groups is 3", "divisor of num_heads=4"]),
        (lambda: KdaCoreConfig(num_heads=4, hybrid_ulysses_degree=0), ["hybrid_ulysses_degree is 0", "integer >= 1"]),
        (lambda: _hybrid(4, 3), ["hybrid_ulysses_degree is 3", "a divisor of the group's size 4"]),
        (lambda: _hybrid(8, 4), ["hybrid_ulysses_degree is 4", "a divisor of num_heads 2"]),
        (lambda: KdaCore(KdaCoreConfig(num_heads=3, strategy="ulysses"), _group()), ["num_heads is 3", "multiple of the group's size 2"]),
    ],
)
def test_wrong_configurations_name_the_argument_its_value_and_what_is_allowed(call, words):
    with pytest.raises((ValueError, TypeError)) as error:
        call()
    for word in words:
        assert word in str(error.value)


def _call(core, tokens=8, heads=2, width=4, v_width=4, **changes):
    def x(*shape):
        return Tensor(np.ones(shape, np.float32))

    inputs = {
        "query": x(1, tokens, heads, width), "key": x(1, tokens, heads, width), "value": x(1, tokens, heads, v_width),
        "gate": x(1, tokens, heads, width), "beta": x(1, tokens, heads), "a_log": x(heads), "dt_bias": x(heads, width),
    }  # fmt: skip
    return core(*{**inputs, **changes}.values(), cu_seqlens=changes.get("cu_seqlens"))


@pytest.mark.parametrize(
    ("strategy", "group", "arguments", "words"),
    [
        ("state_scan", _group(), {"heads": 4}, ["Hk=4", "allowed: 2"]),
        ("state_scan", _group(), {"v_width": 8}, ["V=8", "allowed: 4"]),
        ("state_scan", _group(0, 2, (5, 3)), {}, ["query has 8 tokens", "allowed: 5", "rank 0"]),
        ("ulysses", _group(0, 2, (16, 16)), {"tokens": 32}, ["query has 32 tokens", "allowed: 16"]),
        *(  # a tensor-parallel shard of two heads that was handed the parameters of all four
            (strategy, _group(), {name: Tensor(np.ones(shape, np.float32))}, [name, str(shape), allowed])
            for strategy in ("state_scan", "ulysses", "ptp_chain", "ptp_tree")
            for name, shape, allowed in (("a_log", (4,), "Hv=2"), ("dt_bias", (4, 4), "Hv=2"), ("dt_bias", (16,), "Hv*K=8"))
        ),
    ],
)
def test_wrong_inputs_of_a_sliced_core(strategy, group, arguments, words):
    core = KdaCore(KdaCoreConfig(num_heads=2, head_dim=4, strategy=strategy), group)
    with pytest.raises(ValueError) as error:
        _call(core, **arguments)
    for word in words:
        assert word in str(error.value)


def test_configurations_name_the_strategies_that_exist():
    assert config.STRATEGIES == STRATEGIES


def test_ulysses_refuses_an_axis_that_is_not_the_heads():
    cell = ContextParallel(KdaCore(KdaCoreConfig(num_heads=2)), _group(), 1)
    with pytest.raises(ValueError, match=r"input 0 has shape \(1, 8, 3, 4\)"):
        cell(Tensor(np.ones((1, 8, 3, 4), np.float32)))
