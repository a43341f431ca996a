"""A converted Hugging Face checkpoint is where training starts from, on every rank; one of another model is refused by name."""

from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
import yaml
from _runs import read_metrics, start, write_config
from _synthetic import install_loader
from hf_cases import random_tensors, write_checkpoint
from mindspore import Tensor

from kcp import train
from kcp.config import load_run_config
from kcp.hf import hf_to_kcp
from kcp.weights import load_weights, weights_of_run


def first_loss(folder: Path) -> float:
    """Loss of the run's first batch under the checkpoint's weights."""
    from mindformers.tools.register import MindFormerModuleType, MindFormerRegister

    from kcp.models import load_hf

    install_loader()
    loader = MindFormerRegister.registry[MindFormerModuleType.DATASET_LOADER]["SyntheticTokens"]
    columns = ["input_ids", "labels", "loss_mask", "cu_seqlens"]
    rows = list(loader(80, 40, 1, columns).create_tuple_iterator(num_epochs=1, output_numpy=True))[:2]
    batch = [Tensor(np.stack(column)) for column in zip(*rows, strict=True)]
    total, count = load_hf(folder, seq_length=80, kda_chunk_size=16)(*batch)
    return float(total) / float(count)


def prepare(folder: Path, cp: int = 1) -> tuple[Path, Path]:
    """``(run file, Hugging Face folder)`` of a run that starts from a converted random checkpoint, bfloat16 and sharded."""
    source = write_checkpoint(folder / "hf", random_tensors(bf16=True, vocab_size=259), 2, vocab_size=259)
    hf_to_kcp(source, folder / "kcp", shard_bytes=20_000)
    assert len(list((folder / "kcp").glob("*.safetensors"))) > 1
    path = write_config(folder, cp=cp, strategy="state_scan" if cp > 1 else "none")
    run = yaml.safe_load(path.read_text())
    section = yaml.safe_load((folder / "kcp" / "model_config.yaml").read_text())["model"]["model_config"]
    own = {key: value for key, value in run["model"]["model_config"].items() if key.startswith("kda_") or key == "seq_length"}
    run["model"]["model_config"] = section | own
    run["load_checkpoint"] = str(folder / "kcp")
    path.write_text(yaml.safe_dump(run))
    return path, source


@pytest.mark.ci
@pytest.mark.parametrize(("cp", "mode"), [(1, "graph"), (1, "pynative"), (2, "pynative")])
def test_training_starts_from_a_converted_checkpoint(tmp_path, cpu_device, cp, mode):
    ms.set_context(mode=ms.PYNATIVE_MODE)
    path, source = prepare(tmp_path, cp)
    start(cp, [str(path), "--steps", "2", "--mode", mode], tmp_path)
    want = first_loss(source)
    assert abs(want - np.log(259)) > 0.05
    assert read_metrics(tmp_path)[0]["loss"] == pytest.approx(want, rel=1e-5)


def test_weights_of_another_model_are_refused_by_name(tmp_path, capsys):
    path, _ = prepare(tmp_path)
    run = yaml.safe_load(path.read_text())
    run["model"]["model_config"]["num_experts"] = 5
    path.write_text(yaml.safe_dump(run))
    assert train.main([str(path), "--output-dir", str(tmp_path / "out")]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert all(line.startswith("kcp: error: model.layers.1.block_sparse_moe.") for line in lines)
    assert any("experts.4.w1.weight: missing, shape [10, 16] is needed" in line for line in lines)
    assert any("gate.weight: has shape [4, 16], [5, 16] is needed" in line for line in lines)
    assert not (tmp_path / "out").exists()


def test_other_checkpoints_are_left_to_mindformers(tmp_path):
    path, _ = prepare(tmp_path)
    assert len(weights_of_run(load_run_config(path))) == len(random_tensors())
    run = yaml.safe_load(path.read_text())
    (tmp_path / "saved" / "rank_0").mkdir(parents=True)
    for change in ({"load_checkpoint": ""}, {"load_checkpoint": str(tmp_path / "saved")}, {"resume_training": True}):
        path.write_text(yaml.safe_dump(run | change))
        assert weights_of_run(load_run_config(path)) is None


def test_a_tensor_without_a_parameter_is_named(tmp_path, cpu_device):
    from kcp.layers.linear import Linear

    tensors = weights_of_run(load_run_config(prepare(tmp_path)[0]))
    with pytest.raises(RuntimeError, match="no parameter in the network for lm_head.weight"):
        load_weights(Linear(2, 2), {"lm_head.weight": tensors["lm_head.weight"]})
