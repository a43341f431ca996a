"""docs/training.md against the code: every key that a configuration may have, with its default, and every environment variable."""

import copy
import re
from dataclasses import fields

import pytest
import yaml
from _msrun import REPO

from kcp.config import ConfigError, DataOptions, ModelOptions, ParallelOptions, TrainingOptions, load_run_config
from kcp.config_fields import Section
from kcp.config_run import CheckpointOptions, HealthOptions, MemoryOptions

PAGE = (REPO / "docs" / "training.md").read_text()
MODEL = "model.model_config"
# Keys that kcp hands on or reads from the raw file, without a Section.
RAW = {"load_checkpoint", "resume_training", "ignore_data_skip", "tensorboard"}
# Sections whose own name is all that is read, and keys that the page says with their section.
NOT_KEYS = {"train_dataset", "runner_config", "context", "lr_schedule", "optimizer", "parallel", "parallel_config", "recompute_config"}
NOT_KEYS |= {"runner_wrapper", "model", "model_config"}


def tables() -> dict[str, dict[str, str]]:
    """Keys and defaults of the tables under ``## Keys``, by heading."""
    part = PAGE.split("## Keys\n")[1].split("\n## ")[0]
    found = {}
    for block in part.split("### ")[1:]:
        heading, _, body = block.partition("\n")
        found[heading.strip()] = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", body, re.M))
    return found


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """``(section, key)`` of everything that reading the shipped files and one of each kind of data asks for."""
    seen = set()
    take = Section._take

    def record(self, key, default):
        seen.add((re.sub(r"\[\d+\]", "", self.path), key))
        return take(self, key, default)

    monkeypatch.setattr(Section, "_take", record)
    base = yaml.safe_load((REPO / "configs" / "tiny_cp2.yaml").read_text())
    base["callbacks"] = [{"type": "KcpCheckpoint"}, {"type": "KcpHealth"}, {"type": "KcpMemory"}]
    base |= {"do_eval": True, "eval_dataset": {}}
    loaders = [
        base["train_dataset"]["data_loader"],
        {"type": "KcpMegatronDataset", "data_path": "x", "num_samples": 4},
        {"type": "KcpHuggingFaceDataset", "load": {}},
    ]
    for number, loader in enumerate(loaders):
        content = copy.deepcopy(base)
        content["train_dataset"]["data_loader"] = loader
        content[MODEL.split(".")[0]]["model_config"] |= {"num_attention_heads": 4, "num_key_value_heads": 4} if number else {}
        path = tmp_path / f"{number}.yaml"
        path.write_text(yaml.safe_dump(content))
        load_run_config(path)
    refused = copy.deepcopy(base)
    refused["model"]["model_config"] |= {
        "linear_attn_config": {},
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "mla_cp_strategy": "none",
    }
    path.write_text(yaml.safe_dump(refused))
    with pytest.raises(ConfigError):
        load_run_config(path)
    return seen


def test_every_key_is_on_the_page_and_no_other(asked):
    page = tables()
    documented = {key for keys in page.values() for key in keys}
    read = {key for _, key in asked} - NOT_KEYS
    assert read - documented == set()
    assert documented - read - RAW - {"num_key_value_heads", *("linear_attn_config", "first_k_dense_replace", "moe_layer_freq")} == set()
    assert {key for section, key in asked if section == MODEL} <= page[MODEL].keys()


def test_defaults_on_the_page_are_those_of_the_code():
    page = tables()
    sections = {
        MODEL: (ModelOptions,),
        "parallel_config, parallel": (ParallelOptions,),
        "train_dataset.data_loader": (DataOptions,),
        "runner_config, optimizer, lr_schedule, recompute_config, context": (TrainingOptions,),
        "callbacks": (CheckpointOptions, HealthOptions, MemoryOptions),
    }
    by_words = {"layer_types", "mlp_layer_types", "linear_num_value_heads", "linear_value_head_dim", "mla_cp_strategy"}
    # What a file does not say, MindFormers takes as these; the dataclass says what is needed.
    by_words |= {"sink_mode", "parallel_mode", "dataset_dir"}
    checked = 0
    for heading, classes in sections.items():
        for entry in (entry for kind in classes for entry in fields(kind)):
            if entry.name in page[heading] and entry.name not in by_words:
                assert page[heading][entry.name] == repr(entry.default), entry.name
                checked += 1
    assert checked > 50


def test_environment_variables_are_on_the_page():
    named = set()
    for path in (REPO / "kcp").rglob("*.py"):
        named |= set(re.findall(r"\"((?:KCP|MS)_[A-Z_]+)\"", path.read_text()))
    internal = {"MS_SCHED", "MS_NODE_ID"}
    assert named - internal and not {name for name in named - internal if f"`{name}`" not in PAGE}
