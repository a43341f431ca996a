"""A run that is killed and goes on from its last checkpoint tells what the uninterrupted one tells."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from _msrun import REPO
from _runs import read_metrics, write_config

SHORT, LONG = {"steps": 20, "every": 5, "kill": 13}, {"steps": 200, "every": 50, "kill": 120}


def prepare(folder: Path, every: int, cp: int = 1, **options) -> Path:
    """A run on this repository's documents, 12 samples an epoch, that writes checkpoints."""
    folder.mkdir(parents=True, exist_ok=True)
    path = write_config(folder, cp=cp, strategy="state_scan" if cp > 1 else "none", layers=2, **options)
    run = yaml.safe_load(path.read_text())
    loader = {"type": "KcpTextDataset", "dataset_dir": str(REPO / "docs"), "num_samples": 13, "max_documents": 4}
    run["train_dataset"]["data_loader"] = loader
    run["train_dataset_task"]["dataset_config"] = run["train_dataset"]
    run["callbacks"] = [{"type": "KcpCheckpoint", "save_steps": every, "keep_last": 2}]
    path.write_text(yaml.safe_dump(run))
    return path


def begin(path: Path, steps: int, *arguments: str) -> subprocess.Popen:
    """Start ``kcp train`` on a prepared run."""
    command = [sys.executable, "-m", "kcp.cli", "train", str(path), "--steps", str(steps), *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    return subprocess.Popen(command, env=environment, cwd=path.parent, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen, code: int = 0) -> str:
    """Wait for the end; what was said on stderr."""
    try:
        _, said = process.communicate(timeout=800)
    finally:
        process.kill()
    assert process.returncode == code, said
    return said


def kill_worker(folder: Path, process: subprocess.Popen, step: int, rank: int = 0) -> None:
    """SIGKILL to a worker once a step is in the metrics."""
    metrics = folder / "out" / "metrics.jsonl"
    while process.poll() is None and not (metrics.exists() and metrics.read_text().count("\n") >= step):
        time.sleep(0.005)
    os.kill(json.loads((folder / "out" / "logs" / "status" / f"worker_{rank}.json").read_text())["pid"], signal.SIGKILL)


def losses(folder: Path) -> list[float]:
    records = read_metrics(folder)
    assert [record["step"] for record in records] == list(range(1, len(records) + 1))
    return [record["loss"] for record in records]


def interrupted(folder: Path, plan: dict, cp: int = 1) -> list[float]:
    """Losses of a run whose last rank is killed and that its launcher restarts."""
    path = prepare(folder, plan["every"], cp)
    process = begin(path, plan["steps"], "--restarts", 1)
    kill_worker(folder, process, plan["kill"], cp - 1)
    said = finish(process)
    last = plan["kill"] // plan["every"] * plan["every"]
    assert f"worker {cp - 1} (pid" in said and "SIGKILL" in said
    assert f"kcp: restart 1 of 1, from {folder / 'out' / 'checkpoints' / f'step_{last:08d}'}" in said
    kept = sorted(entry.name for entry in (folder / "out" / "checkpoints").iterdir())
    assert kept == [f"step_{step:08d}" for step in (plan["steps"] - plan["every"], plan["steps"])]
    return losses(folder)


def whole(folder: Path, plan: dict, cp: int = 1) -> list[float]:
    """Losses of a run that nothing interrupts."""
    finish(begin(prepare(folder, plan["every"], cp), plan["steps"]))
    return losses(folder)


def resumed_elsewhere(folder: Path, plan: dict, source: Path) -> list[float]:
    """Losses on one device after a checkpoint of two."""
    path = prepare(folder, plan["every"])
    finish(begin(path, plan["steps"], "--resume", source))
    return [record["loss"] for record in read_metrics(folder)]


@pytest.mark.parametrize("plan", [pytest.param(SHORT, marks=pytest.mark.ci), pytest.param(LONG, marks=pytest.mark.once)])
def test_killed_and_resumed_run_equals_the_uninterrupted_one(tmp_path, plan):
    want = whole(tmp_path / "whole", plan)
    assert len(want) == plan["steps"] and want[-1] < want[0] - 0.5
    assert interrupted(tmp_path / "killed", plan) == want

    two = whole(tmp_path / "two", plan, cp=2)
    assert interrupted(tmp_path / "two_killed", plan, cp=2) == pytest.approx(two, rel=1e-6)

    before = plan["steps"] - plan["every"]
    source = tmp_path / "two" / "out" / "checkpoints" / f"step_{before:08d}"
    assert resumed_elsewhere(tmp_path / "elsewhere", plan, source) == pytest.approx(two[before:], rel=1e-5)
