"""KdaCore among real processes: 2, 3 and 4 ranks under msrun, PyNative and compiled, against the float64 recurrence; all runs twice."""

import json
import sys
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from core_cases import STRATEGIES, CoreProblem, check, check_bfloat16

sys.path.append(str(Path(__file__).resolve().parents[1]))
from _msrun import run_workers  # noqa: E402

NO_STATES = {"with_initial_state": False, "with_final_state": False}
WORKER = str(Path(__file__).with_name("_core_worker.py"))


def _heads(strategy: str, ranks: int) -> dict:
    return {"num_heads": ranks, "num_v_heads": 2 * ranks} if strategy == "ulysses" else {"num_heads": 2, "num_v_heads": 4}


def _dense(strategy: str, ranks: int, **changes) -> CoreProblem:
    return CoreProblem(lengths=(7, 12, 3, 8)[:ranks], strategy=strategy, decay=0.01, seed=ranks, **{**_heads(strategy, ranks), **changes})


def _packed(strategy: str, ranks: int, **changes) -> CoreProblem:
    """Two rows: one document over all ranks, and an empty one between a short one and a long one."""
    total = sum((7, 12, 3, 8)[:ranks])
    return _dense(strategy, ranks, cu_seqlens=((0, total), (0, 5, 5, total - 1, total)), **changes)


def _accepted(ranks: int) -> list[CoreProblem]:
    """The cells that Hyper-Parallel's state scan passed: a tail of one token after a whole chunk, and whole chunks alone."""
    recomputed = {"disable_recompute": False, "state_v_first": True}
    sizes = {"strategy": "state_scan", "batch": 1, "num_heads": 1, "num_v_heads": 2, "head_dim": 128, "v_head_dim": 128}
    cells = {2: [((65,) * 2, {}), ((64,) * 2, recomputed)], 3: [], 4: [((65,) * 4, recomputed)]}[ranks]
    return [CoreProblem(lengths=lengths, options={"chunk_size": 64, **options}, **sizes) for lengths, options in cells]


def _in_pynative(ranks: int) -> list[CoreProblem]:
    kinds = [(_dense, {}), (_packed, {}), (_dense, {"dtype": "bfloat16"}), (_packed, {"dtype": "bfloat16"})]
    return [make(name, ranks, **changes) for name in STRATEGIES for make, changes in kinds] + _accepted(ranks)


def _in_a_graph(ranks: int) -> list[CoreProblem]:
    """Dense with states, in bfloat16 over two ranks; packed with boundaries that the graph learns when it runs."""
    dense = [_dense(name, 2, dtype="bfloat16") for name in STRATEGIES] if ranks == 2 else [_dense("hybrid", 4), _dense("ptp_chain", 4)]
    return dense + [_packed(name, ranks, **NO_STATES) for name in STRATEGIES] + _accepted(ranks)


@pytest.mark.ci
@pytest.mark.parametrize(("ranks", "mode"), [(2, "pynative"), (3, "pynative"), (4, "pynative"), (2, "graph"), (4, "graph")])
def test_core_among_processes(tmp_path, ranks, mode, record_property):
    problems = _in_pynative(ranks) if mode == "pynative" else _in_a_graph(ranks)
    names = [field.name for field in fields(CoreProblem)]
    (tmp_path / "problems.json").write_text(json.dumps([{n: getattr(p, n) for n in names} for p in problems]))
    run_workers(WORKER, workers=ranks, args=[str(tmp_path), mode], timeout=600)
    for number, problem in enumerate(problems):
        results = [dict(np.load(tmp_path / f"result_{number}_{rank}.npz")) for rank in range(ranks)]
        judge = check if problem.dtype == "float32" else check_bfloat16
        found = judge(problem, results)
        record_property(f"{problem.strategy} {problem.dtype} {problem.cu_seqlens}", max((e, n) for n, e in found.items()))
