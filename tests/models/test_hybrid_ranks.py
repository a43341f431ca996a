"""The golden Kimi-Linear over two processes, with every pair of strategies: what transformers computes in one."""

import sys
from pathlib import Path

import numpy as np
import pytest
from hf_cases import check_golden, golden_folder

sys.path.append(str(Path(__file__).resolve().parents[1]))
from _msrun import run_workers  # noqa: E402

WORKER = str(Path(__file__).with_name("_hybrid_worker.py"))
RANKS = 2


def check(folder: Path, kda: str, mla: str, mode: str) -> None:
    ranks = [dict(np.load(folder / f"{kda}-{mla}-{mode}-{rank}.npz")) for rank in range(RANKS)]
    logits = np.concatenate([rank.pop("logits") for rank in ranks], 1)
    count = sum(float(rank.pop("count")) for rank in ranks)
    loss = sum(float(rank.pop("total")) for rank in ranks) / count
    check_golden(logits, loss, {name: sum(rank[name] for rank in ranks) / count for name in ranks[0]})


@pytest.mark.ci
@pytest.mark.parametrize("mla", ["latent_gather", "ulysses"])
def test_two_ranks_equal_transformers_on_one(tmp_path, mla):
    golden_folder()
    cases = [(kda, mla, "pynative") for kda in ("state_scan", "ulysses")]
    run_workers(WORKER, RANKS, [str(tmp_path), *(":".join(case) for case in cases)], timeout=300)
    for case in cases:
        check(tmp_path, *case)


@pytest.mark.ci
@pytest.mark.parametrize(("kda", "mla"), [("state_scan", "latent_gather"), ("ulysses", "ulysses")])
def test_two_ranks_in_a_graph_equal_transformers_on_one(tmp_path, kda, mla):
    golden_folder()
    run_workers(WORKER, RANKS, [str(tmp_path), f"{kda}:{mla}:graph"], timeout=600)
    check(tmp_path, kda, mla, "graph")
