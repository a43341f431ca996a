"""Which failures start a run again, how often, and from which checkpoint."""

import os
import time
from pathlib import Path

import pytest

from kcp import launch_restart
from kcp.checkpoint import STATE
from kcp.launch import LaunchOptions


@pytest.fixture
def play(monkeypatch, tmp_path):
    """Run with a launcher that gives the codes in turn and writes the checkpoints named beside them; its targets and log folders."""

    def run(attempts, restarts, resumed=None):
        calls = []

        def launch(target, options):
            calls.append((list(target), options.log_dir.relative_to(tmp_path)))
            code, steps = attempts[len(calls) - 1]
            for step in steps:
                checkpoint(tmp_path, step)
            return code

        monkeypatch.setattr(launch_restart, "launch", launch)
        options = LaunchOptions(1, tmp_path / "logs")
        return launch_restart.launch_with_restarts(["kcp.train"], options, tmp_path / "checkpoints", resumed, restarts), calls

    return run


def checkpoint(folder: Path, step: int, age: float = 0.0) -> Path:
    place = folder / "checkpoints" / f"step_{step:08d}"
    place.mkdir(parents=True, exist_ok=True)
    (place / STATE).touch()
    os.utime(place / STATE, (time.time() - age,) * 2)
    return place


def test_a_failure_goes_on_from_the_newest_checkpoint_of_this_run(play, tmp_path, capsys):
    checkpoint(tmp_path, 900, age=3600.0)
    code, calls = play([(1, []), (1, [5, 10]), (0, [])], 5)
    place = str(tmp_path / "checkpoints" / "step_00000010")
    assert code == 0 and [target for target, _ in calls] == [["kcp.train"], ["kcp.train"], ["kcp.train", "--resume", place]]
    assert [str(logs) for _, logs in calls] == ["logs", "logs/restart_1", "logs/restart_2"]
    said = capsys.readouterr().err.splitlines()
    assert said == ["kcp: restart 1 of 5, from the beginning, there is no checkpoint yet", f"kcp: restart 2 of 5, from {place}"]


def test_a_resumed_run_goes_on_from_where_it_was_resumed(play, tmp_path):
    place = checkpoint(tmp_path, 7, age=3600.0)
    code, calls = play([(1, []), (0, [])], 1, place)
    assert code == 0 and [target for target, _ in calls] == [["kcp.train", "--resume", str(place)]] * 2


@pytest.mark.parametrize(("code", "tries"), [(0, 1), (2, 1), (130, 1), (1, 3)])
def test_what_is_tried_again_and_how_often(play, code, tries):
    got, calls = play([(code, [])] * 3, 2)
    assert (got, len(calls)) == (code, tries)
