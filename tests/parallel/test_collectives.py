"""The device's collectives on the CPU, over lockstep in place of AllGather and AllReduce: what they give, and what they count.

Real processes run them in ``test_msrun_core.py`` and ``test_msrun_traffic.py``.
"""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, communication, ops

from kcp.parallel import CpGroup, collectives, lockstep, traffic
from kcp.parallel.collectives import Collectives, SingleRank, SubgroupCollectives

DTYPES = (ms.float32, ms.bfloat16, ms.float16)


@pytest.fixture(autouse=True)
def record():
    traffic.of_process().reset()
    yield traffic.of_process()
    traffic.of_process().reset()


def over_lockstep(group, kind):
    """Collectives whose two primitives are lockstep's: AllGather joins along the first axis and knows no bfloat16."""

    def gather(x):
        assert x.dtype != ms.bfloat16 and x.shape[0] == 1
        return group.collectives.all_gather(x[0], "state")

    c = kind(group.rank, group.size) if kind is Collectives else kind(group.rank, group.size, "part", range(1, 2 * group.size, 2))
    c._gather, c._reduce = gather, lambda x: group.collectives.all_reduce(x, "state")
    return c


def numbers(rank, shape, dtype):
    return Tensor(np.arange(np.prod(shape)).reshape(shape) + 100 * rank, dtype)


def run(body, kind, size=3):
    return lockstep.run(size, lambda group: body(over_lockstep(group, kind)))


@pytest.mark.parametrize("kind", [Collectives, SubgroupCollectives])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_gives_what_it_says(kind, dtype):
    def body(c):
        x, wide = numbers(c.rank, (2, 4), dtype), numbers(c.rank, (2, 3, 4), dtype)
        first = numbers(c.rank, (3, 5), dtype)
        results = c.all_gather(x, "tokens"), c.all_to_all(first, "heads"), c.all_to_all(wide, "heads", 1)
        assert all(y.dtype == dtype for y in results)
        return [y.astype(ms.float32).asnumpy() for y in results]

    first, wide = ([numbers(r, shape, ms.float32).asnumpy() for r in range(3)] for shape in ((3, 5), (2, 3, 4)))
    for rank, (gathered, one, two) in enumerate(run(body, kind)):
        np.testing.assert_array_equal(gathered, [numbers(r, (2, 4), ms.float32).asnumpy() for r in range(3)])
        np.testing.assert_array_equal(one, [first[r][rank] for r in range(3)])
        np.testing.assert_array_equal(two, [wide[r][:, rank] for r in range(3)])


def test_sums_and_rounds():
    def body(c):
        x = numbers(c.rank, (2, 2), ms.float32)
        return c.all_reduce(x, "parameter").asnumpy(), c.round(x, (c.rank + 1) % 3, "state").asnumpy()

    for rank, (total, arrived) in enumerate(run(body, Collectives)):
        np.testing.assert_array_equal(total, [[300, 303], [306, 309]])
        np.testing.assert_array_equal(arrived, numbers((rank + 1) % 3, (2, 2), ms.float32).asnumpy())


@pytest.mark.parametrize(("kind", "copies"), [(Collectives, 2), (SubgroupCollectives, 3)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_counts_what_arrives(kind, copies, dtype, record):
    """Three ranks' counts in one record. A sub-group sums three payloads of float32; only bfloat16 is wide among all ranks."""
    size = 4 if dtype == ms.float32 else 2
    moved = 4 if kind is SubgroupCollectives or dtype == ms.bfloat16 else size

    def body(c):
        c.all_gather(numbers(c.rank, (2, 4), dtype), "tokens")
        c.all_to_all(numbers(c.rank, (2, 3, 4), dtype), "heads", 1)
        c.all_reduce(numbers(c.rank, (2, 4), dtype), "parameter")
        c.round(numbers(c.rank, (2, 4), ms.float32), 0, "state")

    run(body, kind)
    found = {name: (r.exchanges, r.logical, r.physical) for name, r in record.read().items() if r.exchanges}
    assert found == {
        "tokens": (3, 3 * 2 * 8 * size, 3 * copies * 8 * moved),
        "heads": (3, 3 * 2 * 8 * size, 3 * 3 * copies * 8 * moved),
        "parameter": (3, 3 * 8 * size, 3 * 8 * size),
        "state": (3, 2 * 8 * 4, 3 * copies * 8 * 4),
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_device_with_an_all_to_all(monkeypatch, dtype, record):
    """Nothing is emulated and nothing widened: what arrives is what was meant."""
    with monkeypatch.context() as patch:
        patch.setattr(ms, "get_context", lambda name: "Ascend")
        ranks = [Collectives(rank, 3) for rank in range(3)]
    wide = [numbers(r, (2, 3, 4), ms.float32).asnumpy() for r in range(3)]

    def body(group):
        c = ranks[group.rank]
        c._gather, c._exchange = lambda x: group.collectives.all_gather(x[0], "state"), lambda x: group.collectives.all_to_all(x, "heads")
        gathered = c.all_gather(numbers(c.rank, (2, 4), dtype), "tokens")
        exchanged = c.all_to_all(numbers(c.rank, (2, 3, 4), dtype), "heads", 1)
        assert gathered.dtype == exchanged.dtype == dtype
        return gathered.astype(ms.float32).asnumpy(), exchanged.astype(ms.float32).asnumpy()

    for rank, (gathered, exchanged) in enumerate(lockstep.run(3, body)):
        np.testing.assert_array_equal(gathered, [numbers(r, (2, 4), ms.float32).asnumpy() for r in range(3)])
        np.testing.assert_array_equal(exchanged, [wide[r][:, rank] for r in range(3)])
    moved = 3 * 2 * 8 * (4 if dtype == ms.float32 else 2)
    assert [(r.logical, r.physical) for r in (record.read()["tokens"], record.read()["heads"])] == [(moved, moved)] * 2


def test_primitives_are_those_of_the_group(monkeypatch):
    made = []
    for name in ("AllGather", "AllReduce", "AlltoAll"):
        monkeypatch.setattr(ops, name, lambda *sizes, name=name, group="all": made.append((name, sizes, group)))
    Collectives(0, 3)
    SubgroupCollectives(0, 3, "part")
    monkeypatch.setattr(ms, "get_context", lambda name: "Ascend")
    Collectives(0, 3)
    Collectives(0, 3, "part")
    world, part = ([("AllGather", (), group), ("AllReduce", (), group), ("AlltoAll", (3, 0, 0), group)] for group in ("all", "part"))
    assert made == world[:2] + part[:2] + world + part


def test_parts_of_the_launch(monkeypatch):
    """Every second rank of eight, then the last two of those: made once each, by their ranks in the launch."""
    made = []
    monkeypatch.setattr(communication, "create_group", lambda name, ranks: made.append((name, ranks)))
    monkeypatch.setattr(collectives, "_created_groups", set())
    world = Collectives(6, 8)
    even = world.subgroup(range(0, 8, 2))
    assert (type(even), even.rank, even.size, even.world_ranks) == (SubgroupCollectives, 3, 4, (0, 2, 4, 6))
    last = even.subgroup(range(2, 4))
    assert (last.rank, last.size, last.world_ranks) == (1, 2, (4, 6))
    alone = even.subgroup(range(3, 4))
    assert (alone.rank, alone.size, alone.world_ranks) == (0, 1, (6,))
    assert [ranks for _, ranks in made] == [[0, 2, 4, 6], [4, 6], [6]] and len({name for name, _ in made}) == 3
    assert world.subgroup(range(4, 8, 2)).world_ranks == (4, 6) and len(made) == 3
    monkeypatch.setattr(world, "has_all_to_all", True)
    assert type(world.subgroup(range(0, 8, 2))) is Collectives


def test_messages_name_ranks_of_the_launch(monkeypatch, record):
    """Member 2 of the ranks 1, 3 and 5 of a launch is its rank 5; what is received counts, what is sent does not."""
    sent = []
    monkeypatch.setattr(collectives, "_device_send", lambda x, rank: sent.append((x.shape, rank)))
    monkeypatch.setattr(collectives, "_device_recv", lambda shape, rank: (shape, rank))
    c = SubgroupCollectives(1, 3, "part", range(1, 6, 2))
    c.send(numbers(0, (2, 4), ms.float32), 2, "state")
    assert sent == [((2, 4), 5)] and record.read()["state"].exchanges == 1 and record.physical() == record.logical() == 0
    assert c.recv((2, 4), 0, "state") == ((2, 4), 1)
    assert record.physical() == record.logical() == 32
    world = Collectives(1, 3)
    assert world.recv((2, 4), 2, "state") == ((2, 4), 2)
    assert world.has_point_to_point(False) and not world.has_point_to_point(True)


def test_one_rank_moves_nothing(record):
    c, x = CpGroup.single().collectives, numbers(0, (2, 1, 3), ms.float32)
    assert isinstance(c, SingleRank) and (c.rank, c.size) == (0, 1) and c.traffic is record
    assert c.all_gather(x, "tokens").shape == (1, 2, 1, 3)
    assert c.all_reduce(x, "tokens") is x
    np.testing.assert_array_equal(c.all_to_all(x, "heads", 1).asnumpy(), x.asnumpy().transpose(1, 0, 2))
    assert c.has_point_to_point(True) and c.has_point_to_point(False)
    assert record.physical() == record.logical() == 0


def test_a_graph_that_is_compiled_counts_nothing(record):
    assert traffic.payload_bytes((2, 3), ms.float32) == 24

    def counted(x):
        traffic.count(traffic.probe, "state", x.shape, x.dtype, 2, 3, False)
        return x * 2.0

    counted(ops.ones((2, 3)))
    assert (record.logical(), record.physical()) == (48, 72)
    ms.jit(counted)(ops.ones((2, 3)))
    assert (record.logical(), record.physical()) == (48, 72)
