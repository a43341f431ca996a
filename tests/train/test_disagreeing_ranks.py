"""A rank of a training run that differs from the others: refused at start or at the first batch in one line, both values in it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from _msrun import REPO
from _runs import finish, prepare

WORKER = Path(__file__).with_name("_disagreeing_worker.py")
DRIVER = """
import sys
from pathlib import Path
from kcp.launch import LaunchOptions, launch
log_dir, *target = sys.argv[1:]
sys.exit(launch(target, LaunchOptions(2, Path(log_dir))))
"""
REFUSALS = {
    "mode": "configuration.mode: rank 0 has 0, rank 1 has 1",
    "seed": r"parameters\.\S+: rank 0 has float32 \[.*\] that begins .*, rank 1 has float32 \[.*\] that begins .*",
    "boundaries": r"cu_seqlens.*: rank 0 has .*, rank 1 has .*\b11\b.*",
    "length": "rank 1: samples have 40 tokens; allowed: seq_length=80, whole samples that the model slices; .*",
}


# the comparisons themselves are fast tests: tests/parallel/test_agreement.py
LEVEL = {what: pytest.mark.ci if what == "boundaries" else pytest.mark.once for what in REFUSALS}


@pytest.mark.parametrize("what", [pytest.param(what, marks=level) for what, level in LEVEL.items()])
def test_a_rank_that_differs_is_refused_with_both_values(tmp_path, what):
    path = prepare(tmp_path, cp=2)
    logs = tmp_path / "out" / "logs"
    command = [sys.executable, "-c", DRIVER, str(logs), str(WORKER), what, str(path), "--steps", "3"]
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    process = subprocess.Popen(command, env=environment, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    said = finish(process, code=2, timeout=100).splitlines()
    assert len(said) == 1 and re.fullmatch("kcp: error: ranks disagree: " + REFUSALS[what], said[0]), said
    for rank in range(2):
        assert said[0] in (logs / f"worker_{rank}.log").read_text().splitlines()
    assert not (tmp_path / "out" / "metrics.jsonl").exists() or (tmp_path / "out" / "metrics.jsonl").read_text() == ""
