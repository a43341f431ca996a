"""KdaCore among real processes: 2 and 3 ranks under msrun, PyNative and compiled, against the float64 recurrence."""

import json
import sys
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from core_cases import CoreProblem, check

sys.path.append(str(Path(__file__).resolve().parents[1]))
from _msrun import run_workers  # noqa: E402

NO_STATES = {"with_initial_state": False, "with_final_state": False}
WORKER = str(Path(__file__).with_name("_core_worker.py"))


def _problems(ranks: int) -> list[CoreProblem]:
    heads = 2 * ranks
    return [
        CoreProblem(lengths=(9,) * ranks, strategy="state_scan", seed=1),
        CoreProblem(lengths=(9,) * ranks, strategy="ulysses", num_heads=ranks, num_v_heads=heads, seed=2),
        CoreProblem(lengths=(9,) * ranks, strategy="state_scan", seed=4, batch=1, cu_seqlens=(0, 3, 3, 12, 9 * ranks), **NO_STATES),
        CoreProblem(lengths=(7, 12, 3)[:ranks], strategy="state_scan", seed=3, options={"disable_recompute": False, "state_v_first": True}),
    ]


def _point_to_point_problems() -> list[CoreProblem]:
    return [
        CoreProblem(lengths=(9, 4), strategy="ptp_chain", seed=4, options={"disable_recompute": False, "state_v_first": True}),
        CoreProblem(lengths=(9, 4), strategy="ptp_tree", seed=5),
    ]


def _judge(tmp_path, ranks, mode, problems):
    names = [field.name for field in fields(CoreProblem)]
    (tmp_path / "problems.json").write_text(json.dumps([{n: getattr(p, n) for n in names} for p in problems]))
    run_workers(WORKER, workers=ranks, args=[str(tmp_path), mode], timeout=240)
    for number, problem in enumerate(problems):
        check(problem, [dict(np.load(tmp_path / f"result_{number}_{rank}.npz")) for rank in range(ranks)])


@pytest.mark.parametrize(
    ("ranks", "mode"),
    [(2, "pynative"), *(pytest.param(*case, marks=pytest.mark.ci) for case in ((3, "pynative"), (2, "graph"), (3, "graph")))],
)
def test_core_among_processes(tmp_path, ranks, mode):
    problems = _problems(ranks)[: 4 if mode == "pynative" else 3]
    _judge(tmp_path, ranks, mode, problems)


@pytest.mark.ci
@pytest.mark.parametrize("mode", ["pynative", "graph"])
def test_point_to_point_among_processes(tmp_path, mode):
    _judge(tmp_path, 2, mode, _point_to_point_problems())


@pytest.mark.ci
@pytest.mark.parametrize("mode", ["pynative", "graph"])
def test_every_scan_among_four_processes(tmp_path, mode):
    """Sub-groups (hybrid: 2 x 2), chains longer than a hop and trees of two rounds."""
    scans = ("hybrid", "ptp_chain", "ptp_tree") if mode == "pynative" else ("hybrid",)
    _judge(tmp_path, 4, mode, [CoreProblem(lengths=(7, 12, 3, 8), strategy=name, seed=6) for name in scans])
