"""``kcp profile``: what two processes exchange is what the plan says, every layer has its row, refusals."""

import json

import pytest
import yaml
from golden_cases import ROOT

from kcp.cli import main
from kcp.profile import profile_text


@pytest.mark.ci
def test_layers_and_exchanges_of_two_processes(tmp_path, capsys):
    content = yaml.safe_load((ROOT / "configs" / "tiny_cp2.yaml").read_text())
    model = content["model"]["model_config"]
    model |= {"hidden_size": 32, "intermediate_size": 48, "linear_num_heads": 2, "linear_head_dim": 16, "seq_length": 64}
    for dataset in (content["train_dataset"], content["train_dataset_task"]["dataset_config"]):
        dataset["data_loader"]["seq_length"] = 64
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(content))
    assert main(["profile", str(path), "--steps", "1", "--json", str(tmp_path / "out.json")]) == 0
    figures = json.loads((tmp_path / "out.json").read_text())
    assert [(row["name"], row["count"]) for row in figures["layers"]] == [
        ("KDA", 2), ("dense MLP", 2), ("norm", 5), ("head and loss", 1),
    ]  # fmt: skip
    assert all(row["forward"] > 0 and row["backward"] >= 0 for row in figures["layers"]) and figures["step"] > 0
    exchanged = {row["purpose"]: row for row in figures["exchanges"]}
    # batch 2, 2 heads of K = V = 16: [E | M] forward, dE backward; the halo of 3 tokens of q, k and v both ways
    assert exchanged["state"]["logical"] == 2 * 2 * 16 * (32 + 16) * 4
    assert exchanged["halo"]["logical"] == 2 * 2 * 3 * 96 * 4
    said = capsys.readouterr().out
    assert "2 ranks share a sample, state_scan; 2 x 64 tokens a step" in said and "optimizer, rest" in said and "halo" in said


def test_table_adds_up():
    figures = {
        "layers": [
            {"name": "KDA", "count": 3, "forward": 0.01, "backward": 0.02},
            {"name": "norm", "count": 7, "forward": 0.001, "backward": 0.0},
        ],
        "exchanges": [],
        "step": 0.1,
        "run": {"ranks": 1, "strategy": "none", "batch": 1, "tokens": 2048, "threads": "2"},
    }
    lines = profile_text(figures).splitlines()
    assert lines[1] == "a step takes 100.0 ms: 20480 tokens/s"
    assert lines[4].split() == ["KDA", "3", "10.00", "20.00", "90.0", "90.0%"]
    assert lines[6].split()[-2:] == ["3.0", "3.0%"]


def test_refusals(tmp_path, capsys):
    assert main(["profile", str(tmp_path / "none.yaml")]) == 2
    assert "no such file" in capsys.readouterr().err
    assert main(["profile", str(ROOT / "configs" / "kimi_linear_48b_npu.yaml")]) == 2
    assert "context.device_target = 'Ascend': kcp profile runs on the CPU" in capsys.readouterr().err
