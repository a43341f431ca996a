"""Context parallelism on the emulated kernels: two and more ranks in lockstep, two processes under msrun."""

from __future__ import annotations

import json
from dataclasses import replace

import emulator
import numpy as np
import pytest
from _msrun import run_workers
from cp_cases import Bf16Core, distances, run_rank
from golden_cases import ROOT

from kcp.parallel import lockstep

BF16 = 1e-2


def _run(problem: Bf16Core) -> dict[str, float]:
    ranks = lockstep.run(len(problem.lengths), lambda group: run_rank(problem, group), problem.lengths)
    found = distances(problem, ranks)
    bad = {name: error for name, error in found.items() if not error <= BF16}
    assert not bad, bad
    return found


STAGES = {"fwd_prepare", "fwd_h", "fwd_finalize", "bwd_prepare", "bwd_dhu", "bwd_finalize"}


@pytest.mark.ci
@pytest.mark.parametrize(
    ("lengths", "options", "used"),
    [
        ((64, 65), {}, {"merge_fwd_bwd"}),
        ((70, 60), {"disable_recompute": False, "state_v_first": True}, {"merge_fwd_bwd"}),
        ((33, 64, 20), {"keep_transitions": False}, {"pre_process_fwd", "pre_process_bwd", "merge_fwd_bwd"}),
    ],
    ids=["cp2-tail65", "cp2-recompute-v-first", "cp3-transitions-exchanged"],
)
def test_state_scan(lengths, options, used, emulated):
    """Initial state and terminal gradient enter through the neighbours' summaries: the merge kernel can't take them."""
    _run(Bf16Core(lengths=lengths, strategy="state_scan", options=options))
    assert STAGES | used <= set(emulator.calls)


@pytest.mark.parametrize("strategy", ["ptp_chain", "ptp_tree"])
def test_point_to_point(strategy, emulated):
    _run(Bf16Core(lengths=(64, 30), strategy=strategy, options={"ptp_head_groups": 1}))
    assert STAGES <= set(emulator.calls)


def test_hybrid(emulated):
    _run(Bf16Core(lengths=(20, 44, 30, 34), strategy="hybrid", num_heads=2, options={"hybrid_ulysses_degree": 2}))


@pytest.mark.parametrize("safe_gate", [True, False], ids=["lower-bound", "softplus"])
def test_ulysses(safe_gate, emulated):
    """With a softplus gate and no states each rank runs the fused op on its heads."""
    problem = Bf16Core(lengths=(60, 36), strategy="ulysses", slow=False, options={"safe_gate": safe_gate, "allow_neg_eigval": safe_gate})
    problem = replace(problem, with_initial_state=safe_gate, with_final_state=safe_gate)
    _run(problem)
    assert ("chunk_kda" in emulator.calls) != safe_gate
    assert (set(emulator.calls) >= STAGES) == safe_gate


def test_packed_documents(emulated):
    _run(Bf16Core(lengths=(50, 46), strategy="state_scan", cu_seqlens=(0, 20, 20, 75, 96)))
    assert "merge_fwd_bwd" in emulator.calls


def test_two_rows(emulated):
    """B = 2: the summaries fold rows into heads for the merge kernel."""
    _run(Bf16Core(lengths=(20, 24, 20), strategy="state_scan", batch=2))
    assert "merge_fwd_bwd" in emulator.calls


def test_first_and_last_rank_do_not_merge(emulated):
    """CP 2: one merge in the forward (rank 1) and one in the backward (rank 0)."""
    _run(Bf16Core(lengths=(10, 12), strategy="state_scan"))
    assert emulator.calls.count("merge_fwd_bwd") == 2


@pytest.mark.parametrize("missing", ["pre_process_fwd", "merge_fwd_bwd", "bwd_dhu"])
def test_missing_symbols_between_ranks(missing):
    with emulator.installed(missing=(missing,)):
        _run(Bf16Core(lengths=(10, 12, 9), strategy="state_scan"))
        assert missing not in emulator.calls


def test_other_sizes_are_another_backends():
    """K = 64 on every rank, float32 gates held: nothing of Hyper-Parallel is called, the merge included."""
    problem = Bf16Core(lengths=(10, 12), strategy="state_scan", head_dim=64)
    with emulator.installed():
        _run(problem)
        assert emulator.calls == []


@pytest.mark.ci
def test_two_processes():
    """State scan, Ulysses, and Ulysses over the fused op, among two processes, through ms.grad."""
    outputs = run_workers(ROOT / "tests" / "ascend" / "_cp_worker.py", 2, timeout=240)
    for case, count in (("state_scan", 10), ("ulysses", 10), ("fused", 8)):
        lines = [line for line in outputs[0].splitlines() if line.startswith(f"result {case} ")]
        found = json.loads(lines[-1].split(" ", 2)[2])
        assert len(found) == count and all(np.isfinite(e) and e <= BF16 for e in found.values()), (case, found)
