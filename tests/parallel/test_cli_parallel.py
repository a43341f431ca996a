"""kcp plan and kcp simulate on the command line: tables, light imports, refusals in one line."""

import subprocess
import sys
from pathlib import Path

import pytest

from kcp.cli import main

ROOT = Path(__file__).resolve().parents[2]
TINY = str(ROOT / "configs" / "tiny_cp2.yaml")


def test_plan_prints_every_strategy_and_what_auto_takes(capsys):
    assert main(["plan", TINY]) == 0
    table = capsys.readouterr().out
    rows = {line.split()[0]: line.split()[1:] for line in table.splitlines() if line}
    assert rows["state_scan"][:2] == ["0.066", "0.033"]  # 2 rows x 4 heads x 32 x (32 + 32, then 32) x 4 bytes
    assert rows["ulysses"][3] == "3.00"
    assert rows["none"][0] == rows["hybrid"][0] == "no:"
    assert rows["auto"] == "takes state_scan; kda_cp_strategy is state_scan".split()


def test_plan_takes_another_machine_and_another_world(capsys):
    fast = ["--bandwidth", "1e15", "--latency", "0", "--flops", "1e9"]
    assert main(["plan", TINY, "--world-size", "4", *fast]) == 0
    table = capsys.readouterr().out
    assert "over 4 ranks" in table and "given: bandwidth, latency, flops" in table
    assert "auto takes ulysses" in table


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["plan", "missing.yaml"], "missing.yaml: no such file"),
        (["plan", TINY, "--world-size", "3"], "seq_length is 512; allowed: a multiple of context_parallel = 3"),
        (["plan", TINY, "--flops", "0"], "flops is 0.0; allowed: a number > 0"),
        (["simulate", "--ranks", "1025"], "--ranks is 1025; allowed for summaries: at most 1024"),
        (["simulate", "core", "--ranks", "65"], "--ranks is 65; allowed for core: at most 64"),
        (["simulate", "core", "--ranks", "3", "--strategy", "ring"], "strategy is 'ring'"),
    ],
)
def test_refusals_are_one_line(capsys, arguments, line):
    assert main(arguments) == 2
    errors = capsys.readouterr().err.strip().splitlines()
    assert errors[-1].startswith(f"kcp: error: {line}")


def test_simulate_prints_errors(capsys):
    assert main(["simulate", "--ranks", "8", "--heads", "1", "--width", "8"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["ranks", "2", "4", "8"]
    assert main(["simulate", "core", "--ranks", "2", "--heads", "1", "--width", "8", "--documents", "5,7"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("state_scan over 2 ranks, 12 tokens")
    assert float(lines[-1].split()[1]) < 1e-5


def test_plan_needs_no_mindspore():
    code = f"import sys, kcp.cli; kcp.cli.main(['plan', {TINY!r}]); print(sorted(m for m in sys.modules if m.startswith('mind')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr
