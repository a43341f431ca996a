"""Training runs through MindFormers' Trainer: one process and several must tell the same story."""

import math

import numpy as np
import pytest
from _msrun import WorkerError
from _runs import read_metrics, start, train, write_config

STEPS = 20
LOSS, NORM = 1e-4, 1e-3


def check_same(got: list[dict], want: list[dict]) -> None:
    """Losses to 1e-4 and gradient norms to 1e-3 (relative), every step."""
    assert [record["step"] for record in got] == list(range(1, STEPS + 1)) == [record["step"] for record in want]
    for key, tolerance in (("loss", LOSS), ("grad_norm", NORM), ("lr", 1e-6)):
        ours, theirs = [record[key] for record in got], [record[key] for record in want]
        np.testing.assert_allclose(ours, theirs, rtol=tolerance, err_msg=key)


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> list[dict]:
    """The reference: one process, graph mode."""
    return train(tmp_path_factory.mktemp("alone"), steps=STEPS)


@pytest.mark.fast
def test_one_process_learns(alone):
    assert alone[0]["loss"] == pytest.approx(math.log(259), abs=0.1)
    assert alone[-1]["loss"] < alone[0]["loss"] - 0.3
    assert not any(record["skipped"] for record in alone)
    assert all(record["tokens_per_second"] > 0 and record["seconds"] > 0 for record in alone)


@pytest.mark.ci
def test_pynative_equals_graph_mode(alone, tmp_path):
    check_same(train(tmp_path, steps=STEPS, mode="pynative"), alone)


@pytest.mark.parametrize(
    ("strategy", "mode"),
    [
        pytest.param("state_scan", "graph", marks=pytest.mark.fast),
        pytest.param("ulysses", "graph", marks=pytest.mark.ci),
        pytest.param("state_scan", "pynative", marks=pytest.mark.ci),
        pytest.param("ulysses", "pynative", marks=pytest.mark.ci),
    ],
)
def test_two_context_parallel_ranks_equal_one_process(alone, tmp_path, strategy, mode):
    check_same(train(tmp_path, steps=STEPS, mode=mode, cp=2, strategy=strategy), alone)


@pytest.mark.ci
def test_two_layers_on_two_context_parallel_ranks_equal_one_process(tmp_path):
    alone = train(tmp_path / "alone", steps=STEPS, layers=2, tied=True)
    for strategy in ("state_scan", "ulysses"):
        check_same(train(tmp_path / strategy, steps=STEPS, cp=2, strategy=strategy, layers=2, tied=True), alone)


@pytest.mark.ci
def test_two_data_parallel_ranks_equal_one_process(alone, tmp_path):
    check_same(train(tmp_path, steps=STEPS, dp=2, batch_size=1), alone)


@pytest.mark.ci
def test_data_and_context_parallel_together_equal_one_process(alone, tmp_path):
    check_same(train(tmp_path, steps=STEPS, dp=2, cp=2, batch_size=1, strategy="state_scan"), alone)


@pytest.mark.ci
def test_a_run_that_diverges_is_stopped_with_the_reason(tmp_path):
    config = write_config(tmp_path, learning_rate=1.0e30)
    with pytest.raises(WorkerError, match="kcp: error: step .* not finite in 3 steps in a row") as caught:
        start(1, [str(config), "--steps", "12"], tmp_path)
    assert "Traceback" not in caught.value.outputs[0]
    assert sum(record["skipped"] for record in read_metrics(tmp_path)) == 3


@pytest.mark.fast
def test_context_parallel_without_a_launch_is_refused_in_one_line(tmp_path):
    config = write_config(tmp_path, cp=2, strategy="state_scan")
    with pytest.raises(WorkerError, match="ended with 2") as caught:
        start(1, [str(config)], tmp_path)
    lines = [line for line in caught.value.outputs[0].splitlines() if "kcp: error" in line]
    assert len(lines) == 1 and "context_parallel" in lines[0] and "Traceback" not in caught.value.outputs[0]
