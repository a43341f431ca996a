"""What ranks must agree on: each kind of disagreement is refused on every rank, with the values; agreement costs one exchange."""

from importlib.metadata import PackageNotFoundError
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, communication
from mindspore.communication import GlobalComm

from kcp.layers import KdaCore, KdaCoreConfig
from kcp.parallel import CpGroup, RankMismatchError, agreement, check_agreement
from kcp.parallel.agreement import Report, describe_array, disagreements, versions
from kcp.parallel.lockstep import run

pytestmark = [pytest.mark.fast, pytest.mark.usefixtures("cpu_device")]


def said(size, arguments, slice_lengths=None):
    """What each rank of a lockstep run is told; ``arguments(group)`` gives a group and the keywords of check_agreement."""

    def rank_function(group):
        mine, keywords = arguments(group)
        try:
            check_agreement(mine, **keywords)
        except RankMismatchError as error:
            return str(error)
        return ""

    return run(size, rank_function, slice_lengths)


def odd(group, value, other):
    """``value``, but ``other`` on the third rank."""
    return other if group.rank == 2 else value


def parameter(seed):
    return ms.Parameter(Tensor(np.random.default_rng(seed).normal(size=5).astype(np.float32)), name="A_log")


def moved(group, rank):
    return CpGroup(rank, group.size, group.slice_lengths, group.collectives)


def sliced(group, lengths):
    return CpGroup(group.rank, group.size, lengths, group.collectives)


CASES = {
    "nested configuration": (
        lambda g: (g, {"shared": {"configuration": {"optimizer": {"lr": odd(g, 1e-3, 2e-3), "eps": 1e-8}, "steps": 5}}}),
        "configuration.optimizer.lr: ranks 0, 1, 3 have 0.001, rank 2 has 0.002",
    ),
    "a value and none": (
        lambda g: (g, {"shared": {"seed": odd(g, None, Path("here"))}}),
        "seed: ranks 0, 1, 3 have null, rank 2 has here",
    ),
    "a key that one rank lacks": (
        lambda g: (g, {"shared": {"configuration": odd(g, {"seed": 1}, {})}}),
        "configuration.seed: ranks 0, 1, 3 have 1, rank 2 has nothing",
    ),
    "seed of a replicated parameter": (
        lambda g: (g, {"parameters": [parameter(odd(g, 1, 2))]}),
        "parameters.A_log: ranks 0, 1, 3 have float32 [5] that begins 0.345584184 0.82161814 0.330437064 (sha256 ",
    ),
    "boundaries": (
        lambda g: (g, {"cu_seqlens": odd(g, (0, 3, 16), (0, 5, 16)), "local_tokens": 4}),
        "cu_seqlens: ranks 0, 1, 3 have [0, 3, 16], rank 2 has [0, 5, 16]",
    ),
    "one of many boundaries": (
        lambda g: (g, {"cu_seqlens": Tensor([[*range(100), odd(g, 100, 101), 400]], ms.int32), "num_tokens": 400}),
        "cu_seqlens[0][100]: ranks 0, 1, 3 have 100, rank 2 has 101",
    ),
    "tokens of equal slices": (
        lambda g: (g, {"local_tokens": odd(g, 4, 5)}),
        "local_tokens: ranks 0, 1, 3 have 4, rank 2 has 5",
    ),
    "configured tokens": (
        lambda g: (g, {"num_tokens": odd(g, 16, 20)}),
        "num_tokens: ranks 0, 1, 3 have 16, rank 2 has 20",
    ),
    "slice lengths": (
        lambda g: (sliced(g, odd(g, (4, 4, 4, 4), (4, 4, 8, 0))), {}),
        "slice_lengths: ranks 0, 1, 3 have [4, 4, 4, 4], rank 2 has [4, 4, 8, 0]",
    ),
    "slice lengths and length": (
        lambda g: (sliced(g, (4, 4, 4, 3)), {"num_tokens": 16}),
        "rank 0: slice_lengths (4, 4, 4, 3) add up to 15; allowed: num_tokens=16",
    ),
    "ranks that changed places": (
        lambda g: (moved(g, (0, 2, 1, 3)[g.rank]), {}),
        "rank 1: CpGroup has rank 2 of 4, its place in the group is 1; allowed: rank order = slice order; rank 2: CpGroup has rank 1 of 4",
    ),
    "slices that changed places": (
        lambda g: (g, {"local_tokens": 4, "slice_begin": 4 * (0, 1, 3, 2)[g.rank]}),
        "rank 2: its slice begins at 12; allowed: 8, rank order = slice order; rank 3: its slice begins at 8; allowed: 12",
    ),
    "what one rank refuses by itself": (
        lambda g: (g, {"refusals": odd(g, [], ["the text is empty"])}),
        "rank 2: the text is empty",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_every_rank_refuses_with_the_values(case):
    arguments, message = CASES[case]
    told = said(4, arguments)
    assert told[0].startswith("ranks disagree: " + message), told[0]
    assert told == [told[0]] * 4 and "\n" not in told[0]


def test_agreement_passes_with_one_small_exchange():
    def rank_function(group):
        check_agreement(
            group,
            shared={"configuration": {"lr": 1e-3, "names": ["a", "b"]}},
            parameters=[parameter(1)],
            cu_seqlens=[[0, 4, 14], [0, 14, 14]],
            local_tokens=group.slice_lengths[group.rank],
            num_tokens=14,
            slice_begin=(0, 5, 5, 9)[group.rank],
        )
        return group.traffic.read()["parameter"]

    for received in run(4, rank_function, (5, 0, 4, 5)):
        assert (received.exchanges, received.logical) == (1, 3 * 68 * 4)


def test_one_rank_needs_no_exchange_but_is_checked():
    check_agreement(CpGroup.single(), cu_seqlens=(0, 5), local_tokens=5, num_tokens=5)
    check_agreement()
    with pytest.raises(RankMismatchError, match="rank 0: 4 tokens of 5; allowed: 5"):
        check_agreement(CpGroup.single(), local_tokens=4, num_tokens=5)


def test_values_of_a_group_are_compared_within_it():
    reports = [Report(rank, (0, 1) if rank < 2 else (2, 3), {"seed": 1}, {"cu_seqlens": [0, rank // 2]}) for rank in range(4)]
    assert disagreements(reports) == []
    strided = [Report(rank, (rank % 2, rank % 2 + 2), {}, {"cu_seqlens": [0, rank]}) for rank in range(4)]
    assert disagreements(strided) == [
        "cu_seqlens: rank 0 has [0, 0], rank 2 has [0, 2]",
        "cu_seqlens: rank 1 has [0, 1], rank 3 has [0, 3]",
    ]


def test_forms_of_one_value_agree():
    forms = ((0, 4), [0, 4], np.array([0, 4]), Tensor([0, 4], ms.int32))
    assert said(4, lambda g: (g, {"shared": {"seed": (1, np.int64(1))[g.rank % 2], "rows": forms[g.rank]}})) == [""] * 4


@pytest.mark.parametrize(
    "members", [lambda r: tuple(range(r // 2 * 2, r // 2 * 2 + 2)), lambda r: (r % 3, r % 3 + 3)], ids=["blocks", "strided"]
)
@pytest.mark.parametrize("odd_one", [None, 0, 5])
def test_groups_that_share_a_launch(members, odd_one):
    """Six ranks in groups whose values differ from each other's: one exchange if each group agrees, else every rank refuses."""

    def body(group):
        exchanges = []

        def exchange(x):
            exchanges.append(x.size)
            return group.collectives.all_gather(Tensor(x), "parameter").asnumpy()

        values = {"rows": 100 if group.rank == odd_one else members(group.rank)[0]}
        try:
            agreement.compare(Report(group.rank, members(group.rank), {"seed": 1}, values), exchange)
        except RankMismatchError as error:
            return str(error)
        return exchanges

    told = run(6, body)
    if odd_one is None:
        assert told == [[68]] * 6
        return
    first, last = members(odd_one)
    values = [100 if rank == odd_one else first for rank in (first, last)]
    assert told == [f"ranks disagree: rows: rank {first} has {values[0]}, rank {last} has {values[1]}"] * 6


def test_a_long_list_of_differences_is_cut():
    told = said(2, lambda g: (g, {"shared": {f"key{n}": g.rank for n in range(9)}}))
    assert told[0].count("rank 1 has 1") == 6 and told[0].endswith("; and 3 more")
    told = said(2, lambda g: (g, {"shared": {f"key{n}": g.rank for n in range(6)}}))
    assert told[0].count("rank 1 has 1") == 6 and told[0].endswith("rank 1 has 1")


@pytest.mark.parametrize(
    ("ranks", "phrase"),
    [(2, "rank 0 has 1, rank 1 has 2"), (9, "ranks 0, 1, 2, 3, 4, 5, 6, 7 have 1, "), (10, "ranks 0, 1, 2, 3, 4, 5, 6, 7, ... have 1, ")],
)
def test_many_ranks_are_named_by_the_first_eight(ranks, phrase):
    reports = [Report(rank, (rank,), {"seed": 1 if rank < ranks - 1 else 2}) for rank in range(ranks)]
    assert disagreements(reports) == [f"seed: {phrase}rank {ranks - 1} has 2" if ranks > 2 else f"seed: {phrase}"]


def test_three_values_are_shown_and_every_differing_list_whole_if_it_is_short():
    reports = [Report(rank, (rank,), {"names": ["a", "b" * rank]}) for rank in range(5)]
    shown = [f'rank {rank} has ["a", "{"b" * rank}"]' for rank in range(3)]
    assert disagreements(reports) == ["names: " + ", ".join(shown)]
    lists = [Report(rank, (rank,), {"names": list(range(60 + rank))}) for rank in range(2)]
    assert disagreements(lists) == ["names[60]: rank 0 has nothing, rank 1 has 60"]
    ranks = [Report(0, (0, 1)), Report(1, (1,))]
    assert disagreements(ranks) == ["group's ranks: rank 0 has [0, 1], rank 1 has [1]"]


def test_a_launcher_that_counts_differently(monkeypatch):
    monkeypatch.setattr(GlobalComm, "INITED", True)
    monkeypatch.setenv("RANK_ID", "1")
    told = said(3, lambda g: (g, {}))
    expected = [f"rank {rank}: RANK_ID is 1, its rank in the launch is {rank}" for rank in (0, 2)]
    assert all(text in told[0] for text in expected) and "rank 1:" not in told[0]
    with monkeypatch.context() as patch:
        patch.setattr(GlobalComm, "INITED", False)
        assert said(3, lambda g: (g, {})) == [""] * 3
    monkeypatch.delenv("RANK_ID")
    assert said(3, lambda g: (g, {})) == [""] * 3
    assert said(1, lambda g: (g, {})) == [""]


def test_a_launch_of_one_has_nobody_to_ask(monkeypatch):
    monkeypatch.setattr(GlobalComm, "INITED", True)
    monkeypatch.setattr(communication, "get_group_size", lambda: 1)
    monkeypatch.setenv("RANK_ID", "5")
    check_agreement()
    check_agreement(CpGroup.single(), local_tokens=4, num_tokens=4)


def test_what_is_compared_of_versions_and_arrays(monkeypatch):
    found = versions()
    assert list(found) == ["kcp", "mindspore", "mindformers", "numpy", "python"]
    assert (found["mindspore"], found["numpy"]) == (ms.__version__, np.__version__)

    def missing(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(agreement, "version", missing)
    assert versions() == {**found, "mindformers": "not installed"}
    values = np.arange(6, dtype=np.float32).reshape(2, 3) / 4
    described = describe_array(values)
    assert described.startswith("float32 [2, 3] that begins 0 0.25 0.5 (sha256 ") and len(described.split("sha256 ")[1]) == 17
    assert describe_array(Tensor(values)) == describe_array(values[:, ::-1][:, ::-1]) == described
    assert describe_array(values + 1e-7) != described


@pytest.mark.parametrize(
    ("lengths", "keywords", "message"),
    [
        (None, {"local_tokens": 4, "num_tokens": 16, "slice_begin": 5}, "rank 2: its slice begins at 5; allowed: 8"),
        (None, {"local_tokens": 5, "num_tokens": 18, "slice_begin": 9}, "rank 2: 5 tokens of 18; allowed: 4.5, the slice of this rank"),
        ((4, 4, 4, 4), {"local_tokens": 5}, "rank 2: 5 tokens of 16; allowed: 4, the slice of this rank"),
        ((4, 4, 4, 4), {"local_tokens": 4, "slice_begin": 7}, "rank 2: its slice begins at 7; allowed: 8"),
        (None, {"local_tokens": 4, "cu_seqlens": ((0, 16), (0, 15))}, "rank 2: cu_seqlens ends at 15; allowed: 16"),
        (None, {"num_tokens": 16, "cu_seqlens": ((0, 16), ())}, "rank 2: cu_seqlens ends at nothing; allowed: 16"),
    ],
)
def test_tokens_that_do_not_fit(lengths, keywords, message):
    def arguments(group):
        right = {"local_tokens": 4, "slice_begin": 4 * group.rank, "cu_seqlens": ((0, 16), (0, 16))}
        return group, odd(group, {name: right.get(name, keywords[name]) for name in keywords}, keywords)

    told = said(4, arguments, lengths)
    assert told == [told[0]] * 4 and message in told[0] and "not sliced" not in told[0], told[0]


def call(core, tokens, **options):
    shape = (1, tokens, core.config.num_heads)
    wide = [Tensor(np.zeros((*shape, core.config.head_dim), np.float32)) for _ in range(4)]
    return core(*wide, Tensor(np.zeros(shape, np.float32)), **options)


def core_of(group):
    return KdaCore(KdaCoreConfig(num_heads=2, head_dim=8, strategy="state_scan", use_gate_in_kernel=False), group)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("form", ["host", "tensor"])
def test_reported_fault_24(size, form):
    """Boundaries in local positions: refused by the core as it is called, and by the check before a graph hides their values."""
    whole = 8 * size
    local = (0, 3, 8)
    boundaries = local if form == "host" else Tensor(local, ms.int32)
    for rank in range(size):
        with pytest.raises(ValueError, match=f"cu_seqlens.*8.*allowed.*{whole}"):
            call(core_of(CpGroup(rank, size)), 8, cu_seqlens=boundaries)
    told = said(size, lambda g: (g, {"cu_seqlens": boundaries, "local_tokens": 8}))
    wanted = f"rank 0: cu_seqlens ends at 8; allowed: {whole}, boundaries are global positions of the whole sequence"
    assert told == [told[0]] * size and wanted in told[0]


@pytest.mark.parametrize("size", [2, 4])
def test_reported_fault_34(size):
    """An unsliced sequence: the token count against the slice lengths, the boundaries, or the configured length."""
    whole = 8 * size
    for rank in range(size):
        with pytest.raises(ValueError, match=f"query has {whole} tokens; allowed: 8, the slice of rank {rank}"):
            call(core_of(CpGroup(rank, size, (8,) * size)), whole)
        with pytest.raises(ValueError, match=f"cu_seqlens.*{whole}.*allowed.*{whole * size}"):
            call(core_of(CpGroup(rank, size)), whole, cu_seqlens=(0, 3, whole))
    told = said(size, lambda g: (g, {"local_tokens": whole if g.rank == size - 1 else 8, "num_tokens": whole}))
    wanted = f"rank {size - 1}: {whole} tokens of {whole}; allowed: 8, the slice of this rank: the sequence is not sliced"
    assert told == [told[0]] * size and wanted in told[0]
