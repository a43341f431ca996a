"""The command line: help that teaches, one-line errors, exit codes, light imports."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from kcp import cli, doctor, launch_restart

ROOT = Path(__file__).parents[2]
TINY = ROOT / "configs" / "tiny_cp2.yaml"


def kcp(*arguments, cwd=None):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "kcp.cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=cwd, timeout=120)


def edited(tmp_path, change):
    content = yaml.safe_load(TINY.read_text())
    change(content)
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["validate", "--help"], ["convert", "--help"]])
def test_help_has_examples(arguments, capsys):
    with pytest.raises(SystemExit) as leave:
        cli.main(arguments)
    out = capsys.readouterr().out
    assert leave.value.code == 0
    assert "examples:" in out and "configs/tiny_cp2.yaml" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["trian"], "invalid choice: 'trian'"),
        (["train"], "the following arguments are required: CONFIG"),
        (["train", TINY, "--steps", "0"], "0: an integer >= 1 is needed"),
        (["train", TINY, "--mode", "fast"], "invalid choice: 'fast'"),
        (["train", TINY, "--restarts", "-1"], "-1: an integer >= 0 is needed"),
        (["train", TINY, "--resume", "nowhere"], "nowhere: no checkpoint to resume from"),
        (["train", TINY, "--frobnicate"], "unrecognized arguments: --frobnicate"),
        (["train", "nowhere.yaml"], "nowhere.yaml: no such file"),
        (["train", TINY, "--workers", "3"], "parallel_config.context_parallel = 2: "),
        (["train", TINY, "--local-worker-num", "1"], "--master-port: needed when the workers are on several machines"),
        (["train", TINY, "--node-rank", "1"], "--node-rank = 1: 0 to 0 is needed"),
        (["validate", TINY, "--world-size", "1"], "start it with: kcp train"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(arguments, message):
    result = kcp(*arguments)
    assert result.returncode == 2 and result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("kcp: error: ") and message in line


def test_the_three_mistakes_of_a_first_day(tmp_path):
    def misspell(content):
        content["model"]["model_config"]["kda_cp_stratgy"] = content["model"]["model_config"].pop("kda_cp_strategy")

    def three(content):
        content["parallel_config"]["context_parallel"] = 3
        content["model"]["model_config"] |= {"kda_cp_strategy": "ulysses", "seq_length": 510}
        content["train_dataset"]["data_loader"] |= {"seq_length": 510, "context_parallel": 3}
        content.pop("train_dataset_task")

    for change, message in (
        (misspell, "kda_cp_stratgy = 'state_scan': unknown key; did you mean kda_cp_strategy?"),
        (three, "linear_num_heads = 4: ulysses needs a multiple of parallel_config.context_parallel = 3"),
    ):
        result = kcp("train", edited(tmp_path, change))
        assert result.returncode == 2 and "Traceback" not in result.stderr
        assert any(message in line for line in result.stderr.splitlines())


def test_missing_text_is_refused_before_anything_starts(tmp_path):
    path = edited(tmp_path, lambda content: content["train_dataset"]["data_loader"].update(dataset_dir="nowhere"))
    result = kcp("train", path)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("kcp: error: nowhere: no such file or folder") and result.stderr.count("\n") == 1


def test_validate_says_what_will_run():
    result = kcp("validate", TINY, "--world-size", "2")
    assert result.returncode == 0
    assert "2 workers on CPU (data_parallel 1 x context_parallel 2, state_scan), 512 tokens a sample" in result.stdout


def test_commands_are_light():
    code = (
        "import sys, kcp.cli; kcp.cli.main(['validate', sys.argv[1]]); "
        "sys.exit(str([m for m in ('mindspore', 'mindformers') if m in sys.modules] or ''))"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run([sys.executable, "-c", code, TINY], capture_output=True, text=True, env=environment)
    assert result.stderr.strip() == ""


def test_train_hands_the_worker_its_arguments(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(launch_restart, "launch", lambda target, options: calls.append((target, options)) or 5)
    arguments = ["train", str(TINY), "--output-dir", str(tmp_path), "--steps", "3", "--mode", "pynative", "--no-pin"]
    assert cli.main(arguments) == 5
    ((target, options),) = calls
    assert target == ["kcp.train", str(TINY), "--output-dir", str(tmp_path), "--mode", "pynative", "--steps", "3"]
    assert (options.workers, options.local, options.pin, options.log_dir) == (2, 2, False, tmp_path / "logs")


def test_script_passes_multi_node_arguments_on(tmp_path, monkeypatch):
    fake = tmp_path / "bin" / "kcp"
    fake.parent.mkdir()
    fake.write_text('#!/bin/sh\nfor argument in "$@"; do echo "[$argument]"; done\nexit 7\n')
    fake.chmod(0o755)
    command = ["bash", ROOT / "scripts" / "msrun_train.sh", "a b.yaml", "4", "--node-rank", "1"]
    environment = {**os.environ, "PATH": f"{fake.parent}:{os.environ['PATH']}", "KCP_VENV": str(tmp_path / "none")}
    result = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert result.returncode == 7
    assert result.stdout.split("\n")[:-1] == ["[train]", "[a b.yaml]", "[--worker-num]", "[4]", "[--node-rank]", "[1]"]
    assert subprocess.run(command[:3], capture_output=True, env=environment).returncode == 2


def test_doctor_reports_backends_and_problems(capsys, monkeypatch):
    from kcp.ops import backends

    rows = [("chunk_kda", "composite", {"native": "not built"}), ("fwd_h", "-", {"composite": "broken"})]
    monkeypatch.setattr(backends, "describe", lambda: rows, raising=False)
    assert doctor.report() == 1
    out = capsys.readouterr().out
    assert "chunk_kda  composite  (not native: not built)" in out
    assert "kcp: problem: no backend serves fwd_h: composite: broken" in out
    for name in doctor.REQUIRED:
        assert name in out


def test_doctor_names_a_missing_package(capsys, monkeypatch):
    version = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda name: None if name == "mindformers" else version(name))
    assert doctor.report() == 1
    assert "kcp: problem: mindformers is not installed" in capsys.readouterr().out


def test_shipped_files_are_json_serialisable():
    """What the ranks compare at the first step is a digest of the parsed file."""
    from kcp.config import load_run_config

    for path in (ROOT / "configs").glob("*.yaml"):
        json.dumps(load_run_config(path).raw)
