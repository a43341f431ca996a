"""The golden Kimi-Linear over two and four processes, with every strategy: what transformers computes in one."""

import sys
from pathlib import Path

import numpy as np
import pytest
from hf_cases import check_golden, golden_folder

sys.path.append(str(Path(__file__).resolve().parents[1]))
from _msrun import run_workers  # noqa: E402

WORKER = str(Path(__file__).with_name("_hybrid_worker.py"))
KDA = ("state_scan", "ulysses", "ptp_chain", "ptp_tree", "hybrid")


def check(folder: Path, ranks: int, kda: str, mla: str, mode: str) -> None:
    ranks = [dict(np.load(folder / f"{kda}-{mla}-{mode}-{rank}.npz")) for rank in range(ranks)]
    logits = np.concatenate([rank.pop("logits") for rank in ranks], 1)
    count = sum(float(rank.pop("count")) for rank in ranks)
    loss = sum(float(rank.pop("total")) for rank in ranks) / count
    check_golden(logits, loss, {name: sum(rank[name] for rank in ranks) / count for name in ranks[0]})


@pytest.mark.ci
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_equal_transformers_on_one(tmp_path, ranks):
    golden_folder()
    cases = [(kda, ("latent_gather", "ulysses")[number % 2], "pynative") for number, kda in enumerate(KDA)]
    if ranks == 2:
        cases += [("state_scan", "ulysses", "pynative")]
    run_workers(WORKER, ranks, [str(tmp_path), *(":".join(case) for case in cases)], timeout=400)
    for case in cases:
        check(tmp_path, ranks, *case)


@pytest.mark.ci
@pytest.mark.parametrize(("kda", "mla"), [("state_scan", "latent_gather"), ("ulysses", "ulysses")])
def test_two_ranks_in_a_graph_equal_transformers_on_one(tmp_path, kda, mla):
    golden_folder()
    run_workers(WORKER, 2, [str(tmp_path), f"{kda}:{mla}:graph"], timeout=600)
    check(tmp_path, 2, kda, mla, "graph")
