"""A run that is killed and goes on from its last checkpoint tells what the uninterrupted one tells."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from _runs import begin, finish, prepare, read_metrics

SHORT = {"steps": 20, "every": 5, "kill": 13, "mode": "pynative"}
LONG = {"steps": 200, "every": 50, "kill": 120, "mode": "graph"}


def with_checkpoints(folder: Path, every: int, cp: int = 1) -> Path:
    """A run of two layers that keeps its last two checkpoints."""
    return prepare(folder, cp=cp, layers=2, callbacks=[{"type": "KcpCheckpoint", "save_steps": every, "keep_last": 2}])


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
    path = with_checkpoints(folder, plan["every"], cp)
    process = begin(path, plan["steps"], "--mode", plan["mode"], "--restarts", 1)
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
    finish(begin(with_checkpoints(folder, plan["every"], cp), plan["steps"], "--mode", plan["mode"]))
    return losses(folder)


def resumed_elsewhere(folder: Path, plan: dict, source: Path) -> list[float]:
    """Losses on one device after a checkpoint of two."""
    path = with_checkpoints(folder, plan["every"])
    finish(begin(path, plan["steps"], "--mode", plan["mode"], "--resume", source))
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


@pytest.mark.once
def test_experts_resumed_on_one_device_agree_until_a_router_is_undecided(tmp_path):
    """A token whose margin is of the size of rounding may go to another expert; up to there the losses are the same."""
    sizes = {"num_experts": 4, "num_experts_per_token": 2, "moe_intermediate_size": 24, "mlp_layer_types": ["dense", "sparse"]}
    changes = {f"model.model_config.{key}": value for key, value in sizes.items()}
    callbacks = [{"type": "KcpCheckpoint", "save_steps": 20, "keep_last": 0}, {"type": "KcpHealth", "every_steps": 1}]
    records = []
    for cp, arguments in ((2, []), (1, ["--resume", tmp_path / "2" / "out" / "checkpoints" / "step_00000040"])):
        folder = tmp_path / str(cp)
        finish(begin(prepare(folder, cp=cp, layers=2, callbacks=callbacks, changes=changes), 80, "--mode", "pynative", *arguments))
        records.append(read_metrics(folder)[-40:])
    agreed, margins = 0, []
    for two, one in zip(*records, strict=True):
        assert one["step"] == two["step"]
        if one["loss"] != pytest.approx(two["loss"], rel=1e-5):
            break
        agreed += 1
        margins.append(two["moe"]["layer_1"]["router_margin"])
    print(f"{agreed} of 40 steps agree; smallest margins {sorted(margins)[:3]}, of the last one {margins[-1]}")
    assert agreed == 40 or margins[-1] < 1e-4
