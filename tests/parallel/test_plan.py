"""Plans against numbers computed by hand, and their bytes against what a lockstep run counts."""

import itertools
from dataclasses import replace

import mindspore as ms
import pytest
from core_cases import CoreProblem, check, run_explicit

from kcp.layers import KdaCore, KdaCoreConfig
from kcp.parallel import CpGroup, lockstep, plan, strategies
from kcp.parallel.plan import Machine, Sizes, chain_work, choose, compare, estimate, scan_work

FREE = Machine(bandwidth=1e30, latency=0.0, flops=1e9)


def _sizes(ranks, heads=8, **fields):
    defaults = {"batch": 1, "tokens": 16384, "num_heads": heads, "num_v_heads": heads, "head_dim": 128, "v_head_dim": 128}
    return Sizes(ranks=ranks, **{**defaults, **fields})


def _speedup(strategy, sizes):
    return plan.one_device_seconds(sizes, FREE) / estimate(strategy, sizes, FREE).seconds


def test_work_by_hand():
    assert scan_work(2) == pytest.approx(0.7 + 1 + 0.85 + 2)
    assert scan_work(3) == scan_work(64) == pytest.approx(1.17 + 1 + 0.85 + 2)
    assert scan_work(3, keep_transitions=False) == scan_work(4, keep_transitions=False) == pytest.approx(1.17 + 1 + 0.85 + 1.17 + 2)
    assert scan_work(2, True, False) == scan_work(4, True, False) == scan_work(4, keep_transitions=False)
    assert scan_work(2, keep_transitions=False) == scan_work(2)
    assert scan_work(2, packed=True) == scan_work(3, packed=True) == pytest.approx(1.17 + 1 + 0.85 + 2)
    assert scan_work(1) == chain_work(1, 4) == 3
    assert chain_work(3, 4) == pytest.approx(3 * 6 / 4)


def test_bounds_of_the_design():
    assert _speedup("state_scan", _sizes(2)) == pytest.approx(3 * 2 / 4.55, rel=0.01)
    assert _speedup("ptp_chain", _sizes(2)) == pytest.approx(16 / 9)
    assert _speedup("ptp_chain", _sizes(8, 32, ptp_head_groups=32)) == pytest.approx(8 * 32 / 39)
    assert _speedup("ptp_chain", _sizes(8, 32)) == pytest.approx(8 * 32 / 39)  # 56 groups would do, there are 32 heads
    assert _speedup("ptp_chain", _sizes(2, 32)) == pytest.approx(16 / 9)
    assert _speedup("ulysses", _sizes(4)) == pytest.approx(4)


def test_flops_and_memory_by_hand():
    sizes = _sizes(2, 1, tokens=128, head_dim=4, v_head_dim=2, chunk_size=16)
    assert sizes.forward_flops == 64 * (16 * (24 + 8) + 48)
    inputs = 64 * (2 * 4 + 2 + 4 + 1) * 4
    caches = 64 * (4 * 2 / 16 + 2 + 2 * 16) * 4
    scan = estimate("state_scan", sizes, FREE)
    assert scan.kept_bytes == inputs + caches + 4 * 2 * 4 + 2 * 4 * 4 * 4
    assert scan.flops == pytest.approx(4.55 * sizes.forward_flops + 2 * 2 * 4 * 4 * 2)
    assert estimate("ulysses", sizes, FREE).refused == "num_heads is 1; allowed under ulysses: a multiple of the group's size 2"
    chain = estimate("ptp_chain", _sizes(2, 1, tokens=128, head_dim=4, v_head_dim=2, disable_recompute=False), FREE)
    assert chain.kept_bytes == inputs + 4 * 2 * 4


def test_time_by_hand():
    sizes = _sizes(2, 2, tokens=64, head_dim=2, v_head_dim=2)
    machine = Machine(bandwidth=1000.0, latency=0.5, flops=1e4)
    cost = estimate("state_scan", sizes, machine)
    assert (cost.forward_bytes, cost.backward_bytes) == (2 * 2 * 4 * 4, 2 * 4 * 4)
    assert cost.seconds == pytest.approx(cost.flops / 1e4 + 2 * 0.5 + (64 + 32) / 1000)


@pytest.mark.parametrize("point_to_point", [True, False])
@pytest.mark.parametrize(("strategy", "ranks"), [("ulysses", 2), ("state_scan", 3), ("ptp_chain", 3), ("ptp_tree", 5), ("hybrid", 4)])
def test_bytes_are_those_that_a_run_counts(strategy, ranks, point_to_point):
    heads, batch, tokens = 4, 2, 6 * ranks
    options = {"hybrid_ulysses_degree": 2} if strategy == "hybrid" else {}
    problem = CoreProblem(
        lengths=(6,) * ranks, strategy=strategy, batch=batch, num_heads=heads, num_v_heads=heads, with_initial_state=False,
        with_final_state=False, options=options,
    )  # fmt: skip

    def body(group):
        run_explicit(problem, group)
        return group.traffic

    counted = lockstep.run(ranks, body, problem.lengths, point_to_point)
    sizes = Sizes(ranks, batch, tokens, heads, heads, problem.head_dim, problem.v_head_dim, **options)
    cost = estimate(strategy, sizes, Machine(1.0, 0.0, 1.0, has_point_to_point=point_to_point))
    logical, physical = max(t.logical() for t in counted), max(t.physical() for t in counted)
    if strategy == "ptp_tree" and point_to_point:  # the busiest rank forward is at rest backward
        assert physical < cost.physical_bytes < 2 * physical
        return
    assert physical == cost.physical_bytes
    if point_to_point:
        assert logical == cost.forward_bytes + cost.backward_bytes


def test_auto_takes_the_cheapest_that_the_heads_allow():
    fast = Machine(bandwidth=1e12, latency=1e-6, flops=1e11)
    assert choose(_sizes(1), fast).strategy == "none"
    assert choose(_sizes(2), fast).strategy == "ulysses"
    assert choose(_sizes(3), fast).strategy == "ptp_chain"  # 8 heads over 3 ranks
    assert choose(_sizes(64, 1), fast).strategy in ("state_scan", "ptp_tree")
    slow = Machine(bandwidth=1e7, latency=1e-3, flops=1e11)
    assert choose(_sizes(2), slow).strategy == "ptp_chain"  # states instead of tokens
    refused = [cost.strategy for cost in compare(_sizes(3), fast) if cost.refused]
    assert refused == ["none", "ulysses", "hybrid"]


@pytest.mark.parametrize("plan_tokens", [None, 640])
def test_auto_plans_for_what_the_core_is_configured_for(monkeypatch, plan_tokens):
    """In PyNative; a rank has 4,096 tokens where the configuration does not say how many all have."""
    planned = []

    def choose_tree(sizes, machine):
        planned.append((sizes, machine))
        return plan.Cost("ptp_tree")

    monkeypatch.setattr(plan, "choose", choose_tree)
    options = {"chunk_size": 32, "disable_recompute": False, "keep_transitions": False, "ptp_head_groups": 2, "hybrid_ulysses_degree": 2}
    config = KdaCoreConfig(4, 8, head_dim=16, v_head_dim=12, strategy="auto", plan_tokens=plan_tokens, plan_packed=True, **options)
    resolved = strategies.resolve_auto(config, CpGroup(1, 2))
    assert resolved == replace(config, strategy="ptp_tree")
    expected = Sizes(2, 1, plan_tokens or 2 * 4096, 4, 8, 16, 12, packed=True, **options)
    assert planned == [(expected, plan.machine_of(ms.get_context("device_target"), graph=False))]
    assert strategies.resolve_auto(resolved, CpGroup(1, 2)) is resolved


@pytest.mark.parametrize("fields", [{"ranks": 0}, {"tokens": -1}, {"dtype": "int8"}])
def test_sizes_are_checked(fields):
    with pytest.raises(ValueError, match=next(iter(fields))):
        Sizes(**{**vars(_sizes(2)), **fields})


def test_a_core_resolves_auto_when_it_is_built():
    problem = CoreProblem(lengths=(6,) * 3, strategy="auto", num_heads=3, num_v_heads=3, options={"plan_tokens": 18})

    def body(group):
        return KdaCore(problem.config(), group).config.strategy, run_explicit(problem, group)

    results = lockstep.run(3, body, problem.lengths)
    sizes = Sizes(3, 1, 18, 3, 3, problem.head_dim, problem.v_head_dim, chunk_size=16)
    expected = choose(sizes, plan.machine_of(ms.get_context("device_target"), graph=False)).strategy
    assert {strategy for strategy, _ in results} == {expected} <= {"ulysses", "state_scan", "ptp_chain", "ptp_tree"}
    check(problem, [result for _, result in results])
    assert KdaCore(problem.config()).config.strategy == "none"


# 4 ranks, 2 rows of 64 tokens, 4 key and 8 value heads of K = 3 and V = 5, bfloat16: 32 tokens a rank
LOCAL = 32
INPUTS = LOCAL * (2 * 4 * 3 + 8 * (5 + 3 + 1)) * 2
EXCHANGED = INPUTS + LOCAL * 8 * 5 * 2  # and the output
CACHES = LOCAL * 8 * 4 * (3 * 5 + 16 * (5 + 2 * 16)) // 16
STATE, TRANSITION = 2 * 8 * 3 * 5 * 4, 2 * 8 * 3 * 3 * 4
FORWARD_FLOPS = LOCAL * 8 * (16 * (6 * 3 + 4 * 5) + 6 * 3 * 5)
MATMUL = 2 * 2 * 8 * 3 * 3 * 5  # one transition on one state, all rows and heads
SCAN, SHORT_SCAN = 1.17 + 1 + 0.85 + 2, 0.7 + 1 + 0.85 + 2  # from three ranks on, and over two
CPU = {"has_all_to_all": False, "has_point_to_point": False, "has_group_gather": False}


@pytest.mark.parametrize(
    ("strategy", "fields", "machine", "forward", "backward", "physical", "exchanges", "flops", "kept"),
    [
        ("ulysses", {}, {}, EXCHANGED * 3 // 4, EXCHANGED * 3 // 4, EXCHANGED * 3 // 2, 12, 3 * FORWARD_FLOPS, INPUTS),
        ("ulysses", {}, CPU, EXCHANGED * 3 // 4, EXCHANGED * 3 // 4, 2 * EXCHANGED * 3, 12, 3 * FORWARD_FLOPS, INPUTS),
        (
            "state_scan", {}, CPU, 3 * (STATE + TRANSITION), 3 * STATE, 3 * (2 * STATE + TRANSITION), 2,
            SCAN * FORWARD_FLOPS + 2 * 3 * MATMUL, STATE + 4 * TRANSITION,
        ),
        (
            "state_scan", {"keep_transitions": False}, {}, 3 * (STATE + TRANSITION), 3 * (STATE + TRANSITION),
            6 * (STATE + TRANSITION), 2, (SCAN + 1.17) * FORWARD_FLOPS + 2 * 3 * MATMUL, STATE,
        ),
        ("ptp_chain", {}, {}, STATE, STATE, 2 * STATE, 20, 3 * 11 / 8 * FORWARD_FLOPS, STATE),
        ("ptp_chain", {"ptp_head_groups": 2}, CPU, STATE, STATE, 2 * 6 * 3 * STATE // 4, 12, 3 * 7 / 4 * FORWARD_FLOPS, STATE),
        (  # two rounds; the last rank gets a summary of its neighbour, then a state
            "ptp_tree", {}, {}, 2 * STATE + TRANSITION, 2 * STATE + TRANSITION, 4 * STATE + 2 * TRANSITION, 4,
            SCAN * FORWARD_FLOPS + 2 * 2 * 2 * 2 * 2 * 8 * 3 * 3 * (3 + 5), STATE + TRANSITION,
        ),
        (
            "ptp_tree", {"keep_transitions": False}, CPU, 2 * STATE + TRANSITION, 2 * STATE + TRANSITION,
            2 * 2 * 3 * (STATE + TRANSITION), 4, (SCAN + 1.17) * FORWARD_FLOPS + 2 * 2 * 2 * 2 * 2 * 8 * 3 * 3 * (3 + 5), STATE,
        ),
        (  # two blocks of two ranks; each rank scans half the heads
            "hybrid", {"hybrid_ulysses_degree": 2}, {}, EXCHANGED // 2 + (STATE + TRANSITION) // 2, (EXCHANGED + STATE) // 2,
            EXCHANGED + STATE + TRANSITION // 2, 14, SHORT_SCAN * FORWARD_FLOPS + 2 * MATMUL / 2, INPUTS + STATE // 2 + TRANSITION,
        ),
        (
            "hybrid", {"hybrid_ulysses_degree": 2, "keep_transitions": False}, {**CPU, "has_group_gather": True},
            EXCHANGED // 2 + (STATE + TRANSITION) // 2, (EXCHANGED + STATE + TRANSITION) // 2, 2 * EXCHANGED + STATE + TRANSITION, 14,
            SHORT_SCAN * FORWARD_FLOPS + 2 * MATMUL / 2, INPUTS + STATE // 2,
        ),
        (
            "hybrid", {"hybrid_ulysses_degree": 2}, CPU, EXCHANGED // 2 + (STATE + TRANSITION) // 2, (EXCHANGED + STATE) // 2,
            4 * EXCHANGED + 2 * STATE + TRANSITION, 14, SHORT_SCAN * FORWARD_FLOPS + 2 * MATMUL / 2, INPUTS + STATE // 2 + TRANSITION,
        ),
    ],
)  # fmt: skip
def test_costs_by_hand(strategy, fields, machine, forward, backward, physical, exchanges, flops, kept):
    """``kept``: what a strategy holds beside the inputs and caches that all of them do."""
    sizes = Sizes(4, 2, 64, 4, 8, 3, 5, dtype="bfloat16", chunk_size=16, **fields)
    cost = estimate(strategy, sizes, Machine(1e6, 0.25, 1e6, **machine))
    assert cost.refused is None
    assert (cost.forward_bytes, cost.backward_bytes, cost.physical_bytes, cost.exchanges) == (forward, backward, physical, exchanges)
    assert cost.kept_bytes == INPUTS + CACHES + kept
    assert cost.flops == pytest.approx(flops)
    assert cost.seconds == pytest.approx(flops / 1e6 + 0.25 * exchanges + physical / 1e6)


def test_the_busiest_rank_of_a_tree_by_hand():
    """The last of eight: summaries of ranks 6 and 5 (to 4), the state of rank 3."""
    cost = estimate("ptp_tree", Sizes(8, 2, 64, 4, 8, 3, 5), FREE)
    assert (cost.forward_bytes, cost.exchanges) == (3 * STATE + 2 * TRANSITION, 6)


def test_one_rank_and_refusals_by_hand():
    one = Sizes(1, 2, LOCAL // 2, 4, 8, 3, 5, dtype="bfloat16", chunk_size=16)
    cost, machine = estimate("none", one, FREE), Machine(1e6, 0.25, 1e6)
    assert (cost.flops, cost.kept_bytes, cost.exchanges) == (3 * FORWARD_FLOPS, INPUTS + CACHES, 0)
    assert estimate("state_scan", one, FREE).refused == "one rank needs no strategy"
    four = Sizes(4, 2, 64, 4, 8, 3, 5)
    assert estimate("none", four, FREE) == plan.Cost("none", "none is for one rank", 0, 0, 0, 0, 0.0, 0.0, 0, 0.0)
    assert estimate("hybrid", four, FREE).refused == "its ulysses degree would be 4: that is ulysses"
    assert estimate("hybrid", Sizes(4, 2, 64, 1, 8, 3, 5), FREE).refused == "its ulysses degree would be 1: that is state_scan"
    assert plan.one_device_seconds(four, machine) == pytest.approx(4 * estimate("none", four_on_one(four), machine).seconds)
    half = [estimate("ulysses", replace(four, dtype=dtype), FREE) for dtype in ("float16", "bfloat16")]
    assert half[0] == half[1] and 2 * half[0].forward_bytes == estimate("ulysses", four, FREE).forward_bytes
    assert plan.halo_bytes(four, 4) == 3 * 2 * 3 * (2 * 4 * 3 + 8 * 5) * 4
    with pytest.raises(ValueError, match="strategy is 'ring'; allowed: none, ulysses"):
        estimate("ring", four, FREE)


def four_on_one(sizes):
    """A rank's share of ``sizes``, alone."""
    return Sizes(**{**vars(sizes), "ranks": 1, "tokens": sizes.tokens // sizes.ranks})


@pytest.mark.parametrize(
    ("fields", "allowed"),
    [
        ({"bandwidth": 0.0}, r"bandwidth is 0.0; allowed: a number > 0$"),
        ({"flops": 0.0}, r"flops is 0.0; allowed: a number > 0$"),
        ({"latency": -1e-9}, "latency is -1e-09; allowed: a number > 0 or 0"),
        ({"flops": float("inf")}, "flops is inf"),
        ({"bandwidth": float("nan")}, "bandwidth is nan"),
    ],
)
def test_machines_are_checked(fields, allowed):
    with pytest.raises(ValueError, match=allowed):
        Machine(**{"bandwidth": 1.0, "latency": 0.0, "flops": 1.0, **fields})


def test_machines_of_devices():
    """On the CPU an all-to-all and a sub-group's all-gather are emulated; a graph has no point to point anywhere."""
    for device, graph in itertools.product(("CPU", "Ascend", "GPU"), (False, True)):
        machine = plan.machine_of(device, graph)
        assert machine.has_point_to_point is not graph
        assert machine.has_all_to_all is machine.has_group_gather is (device != "CPU")
        assert machine.latency < 1e-2 < machine.bandwidth < machine.flops
        assert ("measured" if device == "CPU" else f"assumed for {device}") in machine.source
