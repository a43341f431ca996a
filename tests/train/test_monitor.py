"""The monitor: metrics, progress lines, curve, the stop of a finished and of a diverged run."""

import io
import json
import math
from types import SimpleNamespace

import numpy as np
import pytest

from kcp.monitor import DivergedError, KcpMonitor


class Run:
    """Just what the monitor reads of MindSpore's RunContext."""

    def __init__(self, epochs=1, batches=5, max_skipped_steps=2):
        network = SimpleNamespace(max_skipped_steps=max_skipped_steps)
        self.params = SimpleNamespace(epoch_num=epochs, batch_num=batches, train_network=network, net_outputs=None)
        self.stopped = False

    def original_args(self):
        return self.params

    def request_stop(self):
        self.stopped = True


def play(monitor, run, steps):
    """Feed ``(loss, skipped)`` steps until the monitor asks to stop."""
    monitor.on_train_begin(run)
    for loss, skipped in steps:
        if run.stopped:
            break
        monitor.on_train_step_begin(run)
        run.params.net_outputs = (loss, skipped, 1.0, 1e-3, math.nan if skipped else 0.5)
        monitor.on_train_step_end(run)
    monitor.on_train_end(run)


def test_samples_that_are_not_whole_are_refused_at_the_first_step(tmp_path):
    monitor, run = KcpMonitor(tmp_path, tokens_per_step=160, world_size=2, seq_length=80), Run()
    tokens = np.zeros((2, 40), np.int32)
    run.params.train_dataset_element = (tokens, tokens, tokens, np.array([[0, 40], [0, 40]], np.int32))
    with pytest.raises(ValueError, match="rank 0: samples have 40 tokens; allowed: seq_length=80"):
        monitor.on_train_step_begin(run)


def records(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_metrics_progress_and_curve(tmp_path):
    out = io.StringIO()
    monitor = KcpMonitor(tmp_path / "new", tokens_per_step=128, stream=out)
    play(monitor, Run(), [(5.0 - step, False) for step in range(5)])
    lines = out.getvalue().splitlines()
    assert lines[0].startswith("step 1/5  loss 5.0000  grad_norm 0.5000  lr 0.001")
    assert "tokens/s" in lines[4] and "eta 0:00:00" in lines[4]
    curve = tmp_path / "new" / "loss.png"
    assert lines[-1] == f"kcp: loss curve: {curve}"
    assert curve.read_bytes().startswith(b"\x89PNG")
    got = records(tmp_path / "new")
    assert [record["loss"] for record in got] == [5.0, 4.0, 3.0, 2.0, 1.0]
    keys = {"step", "loss", "grad_norm", "tokens_per_second", "seconds", "lr", "skipped"}
    assert all(set(record) == keys and not record["skipped"] for record in got)
    assert got[2]["tokens_per_second"] == pytest.approx(128 / got[2]["seconds"], rel=0.2)


def test_stops_at_the_requested_step(tmp_path):
    run = Run(epochs=3, batches=5)
    monitor = KcpMonitor(tmp_path, 128, stop_step=7, stream=io.StringIO())
    play(monitor, run, [(1.0, False)] * 15)
    assert run.stopped and monitor.step == 7 and len(records(tmp_path)) == 7


def test_skipped_steps_are_counted_and_shown(tmp_path):
    out = io.StringIO()
    monitor = KcpMonitor(tmp_path, 128, stream=out)
    play(monitor, Run(), [(2.0, False), (math.nan, True), (2.0, False), (math.inf, True), (1.5, False)])
    assert monitor.skipped == 2 and "5 steps, 2 skipped" in out.getvalue()
    assert "SKIPPED" in out.getvalue().splitlines()[1]
    assert [record["loss"] for record in records(tmp_path)] == [2.0, None, 2.0, None, 1.5]


def test_too_many_skipped_steps_in_a_row_end_the_run(tmp_path):
    monitor = KcpMonitor(tmp_path, 128, stream=io.StringIO())
    with pytest.raises(DivergedError, match="step 3: gradients were not finite in 2 steps in a row"):
        play(monitor, Run(), [(2.0, False), (math.nan, True), (math.nan, True), (1.0, False)])


def test_other_ranks_write_and_print_nothing(tmp_path):
    out = io.StringIO()
    play(KcpMonitor(tmp_path, 128, rank=1, stream=out), Run(), [(1.0, False)] * 5)
    assert out.getvalue() == "" and list(tmp_path.iterdir()) == []
