"""`kcp convert`: both ways bit for bit, and every fault of a folder by name with nothing written."""

import json
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest
import yaml
from hf_cases import TINY, golden_folder, random_tensors, read_safetensors, write_checkpoint, write_safetensors

from kcp import cli
from kcp.hf import CheckpointError, convert, hf_to_kcp, kcp_to_hf, model_options_from_json

ROOT = Path(__file__).resolve().parents[2]
GATE = "model.layers.1.block_sparse_moe.gate.weight"


def round_trip(source, tmp_path, spelling="transformers5", **sizes):
    hf_to_kcp(source, tmp_path / "kcp", **sizes)
    kcp_to_hf(tmp_path / "kcp", tmp_path / "back", spelling=spelling, **sizes)
    assert read_safetensors(tmp_path / "kcp") == read_safetensors(source) == read_safetensors(tmp_path / "back")
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (source, tmp_path / "back"))
    assert model_options_from_json(before) == model_options_from_json(after)
    return after


@pytest.mark.parametrize("spelling", ["transformers5", "linear_attn_config"])
@pytest.mark.parametrize(("bf16", "shards", "shard_bytes"), [(False, 1, 1 << 30), (True, 3, 1 << 30), (True, 1, 2000)])
def test_round_trip_is_bitwise_equal(tmp_path, bf16, shards, shard_bytes, spelling):
    source = write_checkpoint(tmp_path / "hf", random_tensors(bf16=bf16), shards)
    (source / "tokenizer.json").write_text("{}")
    config = round_trip(source, tmp_path, spelling, shard_bytes=shard_bytes)
    assert config["dtype"] == ("bfloat16" if bf16 else "float32")
    assert (config["bos_token_id"], config["pad_token_id"]) == (1, 0)
    files = sorted(path.name for path in (tmp_path / "back").iterdir())
    assert {"config.json", "tokenizer.json"} <= set(files)
    if shard_bytes > 10_000:
        assert "model.safetensors" in files
    else:
        index = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())
        assert set(index["weight_map"]) == set(random_tensors()) and len(set(index["weight_map"].values())) > 3
        assert set(index["weight_map"].values()) == {name for name in files if name.endswith(".safetensors")}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "hf", "kcp"]


def test_golden_round_trip_is_bitwise_equal(tmp_path):
    round_trip(golden_folder(), tmp_path)


def test_written_files_are_read_by_safetensors_itself(tmp_path):
    from safetensors.numpy import load_file

    tensors = random_tensors()
    hf_to_kcp(write_checkpoint(tmp_path / "hf", tensors, 2), tmp_path / "kcp")
    loaded = load_file(tmp_path / "kcp" / "kcp-00001-of-00001.safetensors")
    assert {name: value.tobytes() for name, value in loaded.items()} == {name: raw for name, (_, _, raw) in tensors.items()}


def test_model_config_is_a_section_of_a_run(tmp_path):
    hf_to_kcp(write_checkpoint(tmp_path / "hf", random_tensors()), tmp_path / "kcp")
    section = yaml.safe_load((tmp_path / "kcp" / "model_config.yaml").read_text())["model"]["model_config"]
    assert section["layer_types"] == ["linear_attention", "full_attention"]
    run = yaml.safe_load((ROOT / "configs" / "tiny_cp2.yaml").read_text())
    run["model"]["model_config"] = section | {"seq_length": 512, "kda_cp_strategy": "ulysses", "vocab_size": 259}
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(run))
    assert cli.main(["validate", str(path)]) == 0
    run["model"]["model_config"]["vocab_size"] = 23
    path.write_text(yaml.safe_dump(run))
    kcp_to_hf(tmp_path / "kcp", tmp_path / "back", config=path)
    assert read_safetensors(tmp_path / "back") == random_tensors()


def test_a_large_checkpoint_passes_through_little_memory(tmp_path):
    tensors = random_tensors()
    rows = 400_000
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = ("F32", (rows, 16), bytes(rows * 64))
    source = write_checkpoint(tmp_path / "hf", tensors, 2, vocab_size=rows)
    del tensors
    tracemalloc.start()
    hf_to_kcp(source, tmp_path / "kcp")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 << 20 < rows * 64


def missing(source, tensors):
    del tensors[GATE]


def extra(source, tensors):
    tensors["model.layers.1.self_attn.q_norm.weight"] = ("F32", (2,), bytes(8))


def misshaped(source, tensors):
    tensors[GATE] = ("F32", (16, 4), tensors[GATE][2])


def integers(source, tensors):
    tensors[GATE] = ("I32", (4, 16), tensors[GATE][2])


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (missing, f"{GATE}: missing, shape [4, 16] is needed"),
        (extra, "model.layers.1.self_attn.q_norm.weight: not a tensor of this model (shape [2], in model"),
        (misshaped, f"{GATE}: has shape [16, 4], [4, 16] is needed"),
        (integers, f"{GATE}: dtype I32 in model"),
    ],
)
@pytest.mark.parametrize("shards", [1, 2])
def test_wrong_tensors_are_named_and_nothing_is_written(tmp_path, capsys, fault, expected, shards):
    tensors = random_tensors()
    fault(tmp_path, tensors)
    source = write_checkpoint(tmp_path / "hf", tensors, shards)
    assert cli.main(["convert", "hf-to-kcp", str(source), str(tmp_path / "out")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"kcp: error: {expected}")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_all_wrong_tensors_are_named_at_once(tmp_path):
    tensors = random_tensors()
    for fault in (missing, extra):
        fault(tmp_path, tensors)
    with pytest.raises(CheckpointError) as error:
        hf_to_kcp(write_checkpoint(tmp_path / "hf", tensors), tmp_path / "out")
    assert len(error.value.problems) == 2


def edit_index(source, change):
    path = source / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


@pytest.mark.parametrize(
    "name", ["../stolen.safetensors", "/etc/stolen.safetensors", "a/../../b.safetensors", "x\\y.safetensors", "m.bin", ""]
)
def test_an_index_can_not_leave_the_folder(tmp_path, name):
    source = write_checkpoint(tmp_path / "hf", random_tensors(), 2)
    write_safetensors(tmp_path / "stolen.safetensors", {GATE: random_tensors()[GATE]})
    edit_index(source, lambda weight_map: weight_map.update({GATE: name}))
    with pytest.raises(CheckpointError, match="is not the name of a .*safetensors file in this folder"):
        hf_to_kcp(source, tmp_path / "out")


def damage(source, kind):
    first, second = source / "model-00001-of-00002.safetensors", source / "model-00002-of-00002.safetensors"
    if kind == "no shard":
        second.unlink()
    elif kind == "truncated":
        first.write_bytes(first.read_bytes()[:-3])
    elif kind == "garbage":
        first.write_bytes(b"\xff" * 4096)
    elif kind == "empty":
        first.write_bytes(b"")
    elif kind == "twice":
        write_safetensors(second, random_tensors())
    elif kind == "index":
        (source / "model.safetensors.index.json").write_text("[" * 100_000)
    elif kind == "no map":
        (source / "model.safetensors.index.json").write_text('{"weight_map": [1]}')
    elif kind == "elsewhere":
        edit_index(source, lambda weight_map: weight_map.update({GATE: first.name if weight_map[GATE] == second.name else second.name}))
    elif kind == "config":
        (source / "config.json").write_bytes(b"\xff\xfe")
    elif kind == "no config":
        (source / "config.json").unlink()
    elif kind == "pickle":
        for path in source.glob("*.safetensors*"):
            path.unlink()
        (source / "pytorch_model.bin").write_bytes(b"\x80\x04.")


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("no shard", "model-00002-of-00002.safetensors: no such file, but the index names it"),
        ("truncated", "model-00001-of-00002.safetensors: not a safetensors file"),
        ("garbage", "model-00001-of-00002.safetensors: not a safetensors file"),
        ("empty", "model-00001-of-00002.safetensors: not a safetensors file"),
        ("twice", "and again in model-00002-of-00002.safetensors"),
        ("index", "model.safetensors.index.json: not JSON"),
        ("no map", "weight_map, a mapping of tensors to files, is needed"),
        ("elsewhere", "which the index does not say"),
        ("config", "config.json: not JSON"),
        ("no config", "config.json: no such file"),
        ("pickle", "no *.safetensors file (pickled checkpoints are not read)"),
    ],
)
def test_damaged_folders_are_refused_in_lines(tmp_path, capsys, kind, expected):
    source = write_checkpoint(tmp_path / "hf", random_tensors(), 2)
    damage(source, kind)
    assert cli.main(["convert", "hf-to-kcp", str(source), str(tmp_path / "out")]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines and all(line.startswith("kcp: error: ") for line in lines)
    assert any(expected in line for line in lines)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_targets_that_would_be_overwritten_are_refused(tmp_path):
    source = write_checkpoint(tmp_path / "hf", random_tensors())
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for target, message in ((source, "is not empty"), (tmp_path / "file", "is not a folder"), (tmp_path / "link", "is not a folder")):
        with pytest.raises(CheckpointError, match=message):
            hf_to_kcp(source, target)
    with pytest.raises(CheckpointError, match="no such folder"):
        hf_to_kcp(source, tmp_path / "a" / "b")
    with pytest.raises(CheckpointError, match="nowhere: no such folder"):
        hf_to_kcp(tmp_path / "nowhere", tmp_path / "out")
    (tmp_path / "empty").mkdir()
    hf_to_kcp(source, tmp_path / "empty")
    assert read_safetensors(tmp_path / "empty") == random_tensors()


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_write_that_fails_leaves_nothing(tmp_path, monkeypatch, error):
    source = write_checkpoint(tmp_path / "hf", random_tensors())

    def fail(folder, *arguments, **options):
        (folder / "half").write_text("half")
        raise error

    monkeypatch.setattr(convert, "write_shards", fail)
    with pytest.raises(KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else CheckpointError):
        hf_to_kcp(source, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_a_disk_that_is_too_small_is_refused_first(tmp_path, monkeypatch):
    source = write_checkpoint(tmp_path / "hf", random_tensors())
    monkeypatch.setattr(convert.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 10})())
    with pytest.raises(CheckpointError, match="bytes are needed, 10 are free"):
        hf_to_kcp(source, tmp_path / "out")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda section: section.update(kda_safe_gate=True), "kda_safe_gate = True: Hugging Face's kimi_linear has only"),
        (lambda section: section.update(hidden_size=17), "model.embed_tokens.weight: has shape [23, 16], [23, 17] is needed"),
        (lambda section: section.update(hiden_size=16), "model.model_config.hiden_size = 16: unknown key; did you mean hidden_size?"),
        (lambda section: section.update(num_experts=5), "block_sparse_moe.experts.4.w1.weight: missing"),
    ],
)
def test_kcp_folders_are_checked_too(tmp_path, capsys, change, expected):
    hf_to_kcp(write_checkpoint(tmp_path / "hf", random_tensors()), tmp_path / "kcp")
    content = yaml.safe_load((tmp_path / "kcp" / "model_config.yaml").read_text())
    change(content["model"]["model_config"])
    (tmp_path / "kcp" / "model_config.yaml").write_text(yaml.safe_dump(content))
    assert cli.main(["convert", "kcp-to-hf", str(tmp_path / "kcp"), str(tmp_path / "out")]) == 2
    assert expected in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "kcp"]


def test_command_is_light_and_names_what_it_left_out(tmp_path):
    source = write_checkpoint(tmp_path / "hf", random_tensors(), new_feature=True)
    code = (
        "import sys, kcp.cli; code = kcp.cli.main(['convert', 'hf-to-kcp', *sys.argv[1:]]); "
        "assert not {'mindspore', 'mindformers', 'torch', 'transformers'} & set(sys.modules); sys.exit(code)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code, str(source), str(tmp_path / "out")]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert (result.returncode, result.stderr) == (0, "")
    assert "not carried over: new_feature" in result.stdout
    assert TINY["vocab_size"] == 23 and (tmp_path / "out" / "model_config.yaml").exists()


@pytest.mark.parametrize("arguments", [["convert"], ["convert", "hf-to-kcp", "DIR"], ["convert", "sideways", "A", "B"]])
def test_wrong_commands_end_with_2(arguments, capsys):
    with pytest.raises(SystemExit) as leave:
        cli.main(arguments)
    assert leave.value.code == 2 and capsys.readouterr().err.startswith("kcp: error: ")
