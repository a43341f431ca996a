"""Hugging Face folders that were cut, changed or linked elsewhere: what is wrong with them is said, and nothing else happens."""

import json
import os
import pickle

import numpy as np
import pytest
from hf_cases import random_tensors, write_checkpoint

from kcp import cli
from kcp.hf import CheckpointError, expected_shapes, hf_to_kcp, scan
from kcp.hf.convert import read_hf

SHARD = "model.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def source(tmp_path):
    return write_checkpoint(tmp_path / "hf", random_tensors(), 1)


def outcome(folder):
    """``(shapes, None)`` of a folder that is read, ``(None, lines)`` of one that is refused; anything else is an error of the test."""
    try:
        _, tensors, _ = read_hf(folder)
    except CheckpointError as error:
        assert error.problems and all(line and "\n" not in line for line in error.problems)
        return None, error.problems
    return {name: (tensor.dtype, tensor.shape, tensor.num_bytes) for name, tensor in tensors.items()}, None


def test_a_file_cut_anywhere_is_refused(source):
    path = source / SHARD
    content = path.read_bytes()
    header = int.from_bytes(content[:8], "little")
    for size in [0, 1, 7, 8, 9, 8 + header // 2, 7 + header, 8 + header, 9 + header, len(content) // 2, len(content) - 1]:
        path.write_bytes(content[:size])
        _, lines = outcome(source)
        assert lines and str(path) in lines[0], size
    path.write_bytes(content + b"\0")
    assert outcome(source)[1]


def test_every_flipped_bit_of_a_header_is_refused_or_changes_nothing_that_is_used(source):
    """The header says names, types, shapes and places; a folder that is read has exactly those it had."""
    path = source / SHARD
    content = path.read_bytes()
    header = int.from_bytes(content[:8], "little")
    whole, _ = outcome(source)
    rng = np.random.default_rng(0)
    refused = 0
    for position in [*range(8), *rng.integers(8, 8 + header, 400).tolist()]:
        bit = 1 << int(rng.integers(8))
        path.write_bytes(content[:position] + bytes([content[position] ^ bit]) + content[position + 1 :])
        found, lines = outcome(source)
        refused += found is None
        if found is not None:
            assert found == whole, (position, bit)
    assert refused > 300


@pytest.mark.parametrize("name", ["config.json", INDEX])
def test_flipped_bits_of_json_are_refused_or_read(tmp_path, name):
    source = write_checkpoint(tmp_path / "hf", random_tensors(), 2)
    path = source / name
    content = path.read_bytes()
    rng = np.random.default_rng(1)
    refused = 0
    for position in rng.integers(0, len(content), 150).tolist():
        path.write_bytes(content[:position] + bytes([content[position] ^ 1 << int(rng.integers(8))]) + content[position + 1 :])
        refused += outcome(source)[0] is None
    assert refused > 75


HOSTILE = [-1, 0, 10**30, 1e308, float("nan"), "", "x" * 1000, [], [[]], {}, {"a": None}, True, None]


def test_values_of_no_sense_in_config_json_are_refused_or_read(source):
    path = source / "config.json"
    content = json.loads(path.read_text())
    for key in content:
        for value in HOSTILE:
            path.write_text(json.dumps(content | {key: value}))
            outcome(source)


def test_a_model_of_more_tensors_than_any_is_refused_before_they_are_listed(source):
    path = source / "config.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"num_experts": 10**12}))
    assert outcome(source)[1] == (f"num_hidden_layers = 2 with num_experts = {10**12}: that is more than 4194304 tensors, "
                                  "the most that a checkpoint may have",)  # fmt: skip
    path.write_text(json.dumps(content | {"num_hidden_layers": 10**7}))
    assert outcome(source)[1][0] == "config.json.num_hidden_layers = 10000000: an integer from 1 to 10000 is needed"
    with pytest.raises(CheckpointError, match="num_experts = 1000000000"):
        expected_shapes({"layer_types": ("linear_attention",), "mlp_layer_types": ("sparse",), "num_experts": 10**9,
                         "hidden_size": 1, "vocab_size": 1})  # fmt: skip


@pytest.mark.parametrize("name", [SHARD, "config.json", INDEX, "tokenizer.json"])
@pytest.mark.parametrize("dangling", [False, True])
def test_links_out_of_the_folder_are_not_followed(tmp_path, capsys, name, dangling):
    source = write_checkpoint(tmp_path / "hf", random_tensors(), 2 if name == INDEX else 1)
    (source / "tokenizer.json").write_text("{}")
    (source / name).rename(tmp_path / "elsewhere")
    (source / name).symlink_to("../elsewhere")
    if dangling:
        (tmp_path / "elsewhere").unlink()
    code = cli.main(["convert", "hf-to-kcp", str(source), str(tmp_path / "out")])
    if dangling and name == "tokenizer.json":  # as if it were not there
        assert code == 0 and not (tmp_path / "out" / name).exists()
        return
    (line,) = capsys.readouterr().err.splitlines()
    assert code == 2 and line == f"kcp: error: {source / name}: a link to {tmp_path / 'elsewhere'}, a file of this folder is needed"
    assert not (tmp_path / "out").exists()


def test_links_within_the_folder_and_those_of_a_hugging_face_cache_are_followed(tmp_path):
    whole = scan(write_checkpoint(tmp_path / "plain", random_tensors(), 1)).keys()
    cache = tmp_path / "models--a--b"
    (cache / "blobs").mkdir(parents=True)
    snapshot = write_checkpoint(cache / "snapshots" / "0123abcd", random_tensors(), 1)
    for path in list(snapshot.iterdir()):
        path.rename(cache / "blobs" / f"hash-{path.name}")
        path.symlink_to(os.path.relpath(cache / "blobs" / f"hash-{path.name}", snapshot))
    hf_to_kcp(snapshot, tmp_path / "out")
    assert scan(tmp_path / "out").keys() == whole
    folder = write_checkpoint(tmp_path / "hf", random_tensors(), 1)
    (folder / SHARD).rename(folder / "weights")
    (folder / SHARD).symlink_to("weights")
    assert scan(folder).keys() == whole
    (tmp_path / "alias").symlink_to(folder)
    assert scan(tmp_path / "alias").keys() == whole


class Payload:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("name", [SHARD, "config.json", INDEX])
def test_a_pickle_under_any_name_is_not_loaded(source, tmp_path, name):
    (source / name).write_bytes(pickle.dumps(Payload(tmp_path / "ran")))
    assert outcome(source)[1]
    assert not (tmp_path / "ran").exists()
    pickle.loads((source / name).read_bytes())
    assert (tmp_path / "ran").exists(), "the payload does nothing: the test shows nothing"
