"""A whole KDA layer and a whole tiny model, packed, over 2 and 4 processes: the losses and gradients of one; and two steps of training."""

import json
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from core_cases import STRATEGIES, relative
from layer_cases import Case, merged, run

from kcp.parallel import CpGroup

sys.path.append(str(Path(__file__).resolve().parents[1]))
from _msrun import run_workers  # noqa: E402

WORKER = str(Path(__file__).with_name("_layer_worker.py"))
LOSS, GRADIENT = 1e-5, 1e-4

CASES = [
    *(Case(what, strategy) for what in ("short", "long") for strategy in STRATEGIES),
    Case("short", "state_scan", packed=False),
    *(Case("model", strategy, mla="ulysses" if strategy == "ulysses" else "latent_gather") for strategy in STRATEGIES),
    Case("steps", "ulysses", mla="ulysses"),
]
COMPILED = [Case("model", "ptp_chain", mode="graph"), Case("steps", "ulysses", mode="graph", mla="ulysses")]


@pytest.mark.ci
@pytest.mark.parametrize(("ranks", "cases"), [(2, CASES), (4, CASES), (2, COMPILED)], ids=["2-pynative", "4-pynative", "2-graph"])
def test_losses_and_gradients_do_not_depend_on_the_number_of_ranks(tmp_path, ranks, cases, record_property):
    (tmp_path / "cases.json").write_text(json.dumps([asdict(case) for case in cases]))
    run_workers(WORKER, workers=ranks, args=[str(tmp_path)], timeout=600)
    for number, case in enumerate(cases):
        found = merged(case, [dict(np.load(tmp_path / f"result_{number}_{rank}.npz")) for rank in range(ranks)])
        whole = run(Case(case.what, case.strategy, case.packed), lambda lengths: CpGroup.single())
        assert set(found) == set(whole)
        worst = (0.0, "")
        for name in found:
            error = relative(found[name], whole[name])
            limit = LOSS if name in ("loss", "second loss", "count") else GRADIENT
            if f"spacing of {name}" in whole:  # each step rounds a weight, which may be thousands of times its change
                limit += np.linalg.norm(whole[f"spacing of {name}"]) / np.linalg.norm(whole[name])
            assert error <= limit, (case.name, name, error)
            worst = max(worst, (error, name))
        record_property(case.name, (relative(found["loss"], whole["loss"]), *worst))
