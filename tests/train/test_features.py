"""Accumulation, recompute, evaluation, health figures and parameter groups of whole runs."""

import json
import math
from pathlib import Path

import pytest
from _msrun import REPO
from _runs import begin, finish, prepare, read_metrics

STEPS, RATE, END, WARM = 6, 3e-3, 3e-4, 2
EVALUATION = {
    "do_eval": True,
    "eval_step_interval": 3,
    "eval_dataset": {
        "data_loader": {"type": "KcpTextDataset", "dataset_dir": str(REPO / "README.md"), "num_samples": 8, "max_documents": 4}
    },
}
SCHEDULE = {
    "lr_schedule": {"type": "CosineWithWarmUpLR", "learning_rate": RATE, "lr_end": END, "warmup_steps": WARM, "total_steps": -1},
}
HEALTH = [{"type": "KcpHealth", "every_steps": 2}]
MEANS = ("log_decay_mean", "log_decay_min", "log_decay_max", "beta_mean", "output_gate_mean")


def train(folder: Path, **options) -> list[dict]:
    finish(begin(prepare(folder, callbacks=HEALTH, layers=2, **options), STEPS))
    return read_metrics(folder)


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    """One process, the batch at once, every activation kept."""
    folder = tmp_path_factory.mktemp("plain")
    changes = {**EVALUATION, **SCHEDULE, "tensorboard": {"tensorboard_dir": str(folder / "board")}}
    train(folder, batch_size=4, changes=changes)
    return folder


@pytest.mark.ci
def test_accumulated_and_recomputed_on_two_ranks_equals_one_batch_on_one(plain, tmp_path):
    changes = {**EVALUATION, **SCHEDULE, "runner_config.gradient_accumulation_steps": 2, "recompute_config.recompute": True}
    one, two = read_metrics(plain), train(tmp_path, cp=2, batch_size=2, changes=changes)
    assert len(one) == len(two) == STEPS
    for key, tolerance in (("loss", 1e-5), ("grad_norm", 1e-4), ("lr", 1e-6)):
        assert [record[key] for record in two] == pytest.approx([record[key] for record in one], rel=tolerance), key
    assert [record["step"] for record in two if "eval_loss" in record] == [3, 6]
    for ours, theirs in zip(two, one, strict=True):
        if "eval_loss" in ours:
            assert ours["eval_loss"] == pytest.approx(theirs["eval_loss"], rel=1e-5)
            assert ours["eval_perplexity"] == pytest.approx(math.exp(ours["eval_loss"]), rel=1e-9)
        for layer, figures in ours.get("health", {}).items():
            # The accumulated run shows the first half of the batch: extremes and means are close, not equal.
            for key in MEANS:
                assert figures[key] == pytest.approx(theirs["health"][layer][key], rel=0.2), key


@pytest.mark.ci
def test_figures_of_a_run(plain):
    records = read_metrics(plain)
    assert [record["step"] for record in records if "health" in record] == [2, 4, 6]
    for record in records:
        for figures in record.get("health", {}).values():
            assert figures["log_decay_min"] < figures["log_decay_mean"] < figures["log_decay_max"] <= 0.0
            assert 0.0 < figures["beta_mean"] < 1.0 and 0.0 < figures["output_gate_mean"] < 1.0
            assert figures["state_norm"] > 0.0 and 0.0 <= figures["vanished_heads"] <= 1.0
    evaluations = [record["eval_loss"] for record in records if "eval_loss" in record]
    assert len(evaluations) == 2 and evaluations[1] < evaluations[0] < math.log(259) + 0.1


@pytest.mark.ci
def test_learning_rate_warms_up_and_follows_half_a_cosine(plain):
    want = [RATE * step / WARM for step in range(WARM)]
    want += [END + (RATE - END) * 0.5 * (1 + math.cos(math.pi * step / (STEPS - WARM))) for step in range(STEPS - WARM)]
    assert [record["lr"] for record in read_metrics(plain)] == pytest.approx(want, rel=1e-5)


@pytest.mark.ci
def test_gate_parameters_norms_and_biases_do_not_decay(plain):
    log = (plain / "out" / "mindformers_rank0.log").read_text()
    begin_at = log.index("Param groups = ") + len("Param groups = ")
    groups, _ = json.JSONDecoder().raw_decode(log[begin_at:])
    spared, decayed = groups["no_weight_decay"], groups["weight_decay"]
    assert spared["weight_decay"] == 0.0 and decayed["weight_decay"] == 0.1
    names = ("A_log", "dt_bias", "input_layernorm.weight", "o_norm.weight", "model.norm.weight")
    assert all(any(name.endswith(wanted) for name in spared["params"]) for wanted in names)
    assert not any(name.endswith((*names, ".bias")) or "norm" in name for name in decayed["params"])
    assert len(decayed["params"]) > len(spared["params"])
    assert all(name.endswith(("_proj.weight", "conv1d.weight", "embed_tokens.weight", "lm_head.weight")) for name in decayed["params"])


@pytest.mark.ci
def test_tensorboard_shows_what_the_metrics_say(plain):
    from tensorboardX.proto import event_pb2

    found: dict[str, list[float]] = {}
    for file in (plain / "board").rglob("*tfevents*"):
        data, position = file.read_bytes(), 0
        while position < len(data):
            size = int.from_bytes(data[position : position + 8], "little")
            event = event_pb2.Event.FromString(data[position + 12 : position + 12 + size])
            position += 16 + size
            for value in event.summary.value:
                found.setdefault(value.tag, []).append(value.simple_value)
    records = read_metrics(plain)
    assert found["loss"] == pytest.approx([record["loss"] for record in records], rel=1e-6)
    assert found["grad-norm"] == pytest.approx([record["grad_norm"] for record in records], rel=1e-6)
    assert len(found["eval-loss"]) == 2 and len(found["health/layer_0/beta_mean"]) == 3
