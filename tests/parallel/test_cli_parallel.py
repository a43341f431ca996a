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
        (["simulate", "layer", "--ranks", "65"], "--ranks is 65; allowed for layer: at most 64"),
        (["simulate", "layer", "--ranks", "2", "--tokens", "1"], "tokens is 1; allowed: at least 1 a rank, 2"),
        (["simulate", "layer", "--ranks", "3", "--heads", "2", "--strategy", "ulysses"], "num_heads is 2; allowed under ulysses"),
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


@pytest.mark.ci
def test_simulate_runs_a_layer_under_every_strategy_dense_and_packed(capsys):
    assert main(["simulate", "layer", "--ranks", "6", "--width", "4", "--tokens", "47"]) == 0
    title, head, *rows, gates = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert title[:6] == "a KDA layer over 6 ranks,".split()
    assert [row[0] for row in rows] == [name for name in ("ulysses", "state_scan", "ptp_chain", "ptp_tree", "hybrid") for _ in "12"]
    assert ["packed" in row for row in rows] == [False, True] * 5
    limits = [float(limit) for limit in gates[1:]]
    assert limits == [1e-5] + [5e-5] * 5
    assert all(float(error) <= limit for row in rows for error, limit in zip(row[-6:], limits, strict=True))


def test_simulate_fails_where_a_gate_is_exceeded(capsys, monkeypatch):
    from mindspore import ops

    from kcp.parallel.halo import Halo

    layer = ["simulate", "layer", "--ranks", "2", "--width", "4", "--documents", "3,5,3"]
    monkeypatch.setattr(Halo, "backward", lambda self, x, d_halo: ops.zeros_like(x))
    assert main([*layer, "--heads", "3", "--strategy", "state_scan"]) == 1
    above = [line.rpartition(" ")[0] for line in capsys.readouterr().err.splitlines() if line.startswith("kcp: above the gate: ")]
    expected = [f"state_scan, {documents}: {name}" for documents in ("one", "3 packed") for name in ("input", "projections")]
    assert above == [f"kcp: above the gate: {line}" for line in expected]


def test_plan_needs_no_mindspore():
    code = f"import sys, kcp.cli; kcp.cli.main(['plan', {TINY!r}]); print(sorted(m for m in sys.modules if m.startswith('mind')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr
