"""A converted Hugging Face checkpoint is where training starts from, through MindFormers' own loading."""

import sys
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
import yaml
from _runs import read_metrics, start, write_config
from _synthetic import install_loader
from hf_cases import random_tensors, write_checkpoint
from mindspore import Tensor

from kcp.hf import hf_to_kcp

sys.path.append(str(Path(__file__).resolve().parent))


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


@pytest.mark.ci
@pytest.mark.parametrize("cp", [1, 2])
def test_training_starts_from_a_converted_checkpoint(tmp_path, cpu_device, cp):
    ms.set_context(mode=ms.PYNATIVE_MODE)
    source = write_checkpoint(tmp_path / "hf", random_tensors(bf16=True, vocab_size=259), 2, vocab_size=259)
    hf_to_kcp(source, tmp_path / "kcp", shard_bytes=20_000)
    assert len(list((tmp_path / "kcp").glob("*.safetensors"))) > 1
    path = write_config(tmp_path, cp=cp, strategy="state_scan" if cp > 1 else "none")
    run = yaml.safe_load(path.read_text())
    section = yaml.safe_load((tmp_path / "kcp" / "model_config.yaml").read_text())["model"]["model_config"]
    own = {key: value for key, value in run["model"]["model_config"].items() if key.startswith("kda_") or key == "seq_length"}
    run["model"]["model_config"] = section | own
    run |= {"load_checkpoint": str(tmp_path / "kcp"), "auto_trans_ckpt": cp > 1}
    path.write_text(yaml.safe_dump(run))
    start(cp, [str(path), "--steps", "2", "--mode", "pynative"], tmp_path)
    want = first_loss(source)
    assert abs(want - np.log(259)) > 0.05
    assert read_metrics(tmp_path)[0]["loss"] == pytest.approx(want, rel=1e-5)
