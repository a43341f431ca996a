"""The one-step cell on two ranks against NumPy, its finite check, its options; disagreeing ranks."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from _msrun import run_workers

from kcp import __version__

WORKER = Path(__file__).with_name("_step_worker.py")
RATE, MAX_NORM = 0.1, 0.5


@pytest.fixture(scope="module")
def results() -> list[dict]:
    outputs = run_workers(WORKER, 2, timeout=150)
    found = []
    for text in outputs:
        line = next(line for line in text.splitlines() if line.startswith("RESULT "))
        found.append(json.loads(line.removeprefix("RESULT ")))
    return found


def loss_and_gradient(rngs: list[np.random.Generator], w: np.ndarray) -> tuple[float, np.ndarray]:
    """Global loss and gradient, in float64, of the next batch of every rank at some parameters."""
    total, gradient, count = 0.0, np.zeros(3), 0.0
    for rank, rng in enumerate(rngs):
        x = rng.normal(size=(4, 3)).astype(np.float32).astype(np.float64)
        y = rng.normal(size=4).astype(np.float32).astype(np.float64)
        weight = np.array([1, 1, 1, float(rank == 0)])
        error = x @ w - y
        total += (weight * error**2).sum()
        gradient += 2 * (weight * error) @ x
        count += weight.sum()
    return total / count, gradient / count


def expected() -> list[tuple[float, float, np.ndarray]]:
    """Global loss, gradient norm and the parameters after each step, the second step skipped."""
    w = np.array([0.5, -1.0, 2.0])
    rngs = [np.random.default_rng(rank) for rank in range(2)]
    steps = []
    for step in range(3):
        loss, gradient = loss_and_gradient(rngs, w)
        norm = float(np.linalg.norm(gradient))
        if step == 1:
            steps.append((math.nan, math.nan, w.copy()))
            continue
        w = w - RATE * gradient * min(1.0, MAX_NORM / norm)
        steps.append((loss, norm, w.copy()))
    return steps


@pytest.mark.parametrize("mode", ["pynative", "graph"])
def test_global_loss_norm_and_clipped_update(results, mode):
    for result in results:
        for got, (loss, norm, w) in zip(result[mode]["history"], expected(), strict=True):
            if math.isnan(loss):
                continue
            assert got[0] == pytest.approx(loss, rel=1e-5)
            assert got[2] == pytest.approx(norm, rel=1e-5)
            assert norm > MAX_NORM, "the case must clip"
            assert got[3] == pytest.approx(RATE)
            np.testing.assert_allclose(got[4], w, rtol=1e-5)


@pytest.mark.parametrize("mode", ["pynative", "graph"])
def test_a_nan_on_one_rank_makes_every_rank_skip_that_step_alone(results, mode):
    for result in results:
        history = result[mode]["history"]
        assert [step[1] for step in history] == [False, True, False]
        assert history[1][4] == history[0][4], "parameters of the skipped step must stay"
        assert history[2][4] != history[1][4]
    assert results[0][mode]["history"][2][4] == results[1][mode]["history"][2][4]


def clean_step(w: np.ndarray) -> tuple[float, np.ndarray]:
    """Loss and gradient of the first batch of both ranks at some parameters, in float64."""
    return loss_and_gradient([np.random.default_rng(rank) for rank in range(2)], w)


def adam(steps: int) -> tuple[list[float], np.ndarray]:
    """Losses and parameters of so many clean steps of Adam, in float64."""
    w, m, v, losses = np.array([0.5, -1.0, 2.0]), np.zeros(3), np.zeros(3), []
    for step in range(1, steps + 1):
        loss, gradient = clean_step(w)
        losses.append(loss)
        m, v = 0.9 * m + 0.1 * gradient, 0.95 * v + 0.05 * gradient**2
        w = w - RATE * (m / (1 - 0.9**step)) / (np.sqrt(v / (1 - 0.95**step)) + 1e-8)
    return losses, w


@pytest.mark.parametrize("mode", ["pynative", "graph"])
def test_nan_and_infinity_anywhere_leave_every_bit_of_every_rank_as_it_was(results, mode):
    """In one gradient of one rank, of both with opposite signs, in the loss alone, in the sum or the norm by overflow: weights and
    Adam's moments and step count are bitwise those of before, on both ranks, and the next clean step is Adam's second one."""
    first, second = (result[f"faults_{mode}"] for result in results)
    assert [step[0] for step in first] == [step[0] for step in second] == [False] + 7 * [True] + [False]
    assert [step[2] for step in first] == [step[2] for step in second], "ranks differ"
    assert len({step[2] for step in first[:8]}) == 1 and first[8][2] != first[0][2]
    assert {"adam_m.w", "adam_v.w", "global_step", "w"} <= {name.removeprefix("optimizer.") for name in first[0][4]}
    losses, w = adam(2)
    for loss in (first[0][1], second[0][1]):
        assert loss == pytest.approx(losses[0], rel=1e-5)
    for step in (1, 2, 3, 6, 7, 8):  # what is wrong with a gradient leaves the loss alone
        assert first[step][1] == second[step][1] == pytest.approx(losses[1], rel=1e-5)
    assert math.isnan(first[4][1]) and first[5][1] == -math.inf
    np.testing.assert_allclose(first[8][3], w, rtol=1e-5)


def test_parameters_keep_the_names_of_the_network(results):
    assert results[0]["graph"]["parameters"] == ["w"]


DISAGREEMENTS = {
    "configuration": "configuration.a: rank 0 has 0, rank 1 has 1",
    "parameters": r"parameters.p: rank 0 has float32 \[3\] that begins 1 1 1 \(sha256 \w{16}\), "
    r"rank 1 has float32 \[3\] that begins 1.00000012 1.00000012 1.00000012 \(sha256 \w{16}\)",
    "boundaries": r"cu_seqlens: rank 0 has \[0, 3, 8\], rank 1 has \[0, 4, 8\]",
    "versions": f"versions.kcp: rank 0 has {re.escape(__version__)}, rank 1 has 0.0.1",
    "rank order": "rank 0: CpGroup has rank 1 of 2, its place in the group is 0; .*; rank 1: CpGroup has rank 0 of 2, .* is 1; .*",
    "RANK_ID": "rank 0: RANK_ID is 1, its rank in the launch is 0; .*; rank 1: RANK_ID is 0, its rank in the launch is 1; .*",
    "slice_lengths": r"slice_lengths: rank 0 has \[4, 4\], rank 1 has \[3, 5\]",
    "unsliced": "rank 1: 8 tokens of 8; allowed: 4, the slice of this rank: the sequence is not sliced; local_tokens: .* 4, rank 1 has 8",
    "alone": r"group's ranks: rank 0 has \[0, 1\], rank 1 has \[1\]; .*",
}


@pytest.mark.parametrize("what", DISAGREEMENTS)
def test_disagreeing_ranks_are_refused_on_every_rank_with_both_values(results, what):
    messages = [result[what] for result in results]
    assert messages[0] == messages[1]
    assert re.fullmatch("ranks disagree: " + DISAGREEMENTS[what], messages[0]), messages[0]


def test_equal_ranks_pass_and_collectives_still_match(results):
    assert all(result["same"] == "" and result["total"] == 2.0 for result in results)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("max_grad_nrom", 1.0, "runner_wrapper.max_grad_nrom: unknown option"),
        ("max_grad_norm", 0.0, "runner_wrapper.max_grad_norm: 0.0; a positive"),
        ("max_skipped_steps", 0, "runner_wrapper.max_skipped_steps: 0; at least 1"),
        ("scale_sense", 1024, "runner_wrapper.scale_sense: 1024 is not supported"),
    ],
)
def test_illegal_options_are_refused(option, value, message):
    from mindspore import nn

    from kcp.train_step import KcpTrainOneStepCell

    network = nn.Dense(2, 2)
    optimizer = nn.SGD(network.trainable_params(), learning_rate=0.1)
    with pytest.raises(ValueError, match=message):
        KcpTrainOneStepCell(network, optimizer, **{option: value})
