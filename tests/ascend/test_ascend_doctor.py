"""kcp doctor and kcp selftest: what they say of Ascend, and that the self-test tells right from wrong."""

from __future__ import annotations

import subprocess
import sys

import emulator
import numpy as np
import pytest
from golden_cases import EXTRACT, ROOT

from kcp import cli
from kcp.config import load_run_config
from kcp.doctor_ascend import ascend_rows, route_lines
from kcp.selftest import checks, report

NPU8 = str(ROOT / "configs" / "kimi_linear_npu8.yaml")


def test_doctor_without_hyper_parallel(capsys):
    cli.main(["doctor"])
    text = capsys.readouterr().out
    assert "Ascend (Hyper-Parallel's kernels; docs/ascend.md)" in text
    assert "hyper_parallel is not installed; Hyper-Parallel of branch kda_r1.0" in text
    assert "not ascend: it serves Ascend, and the device target is CPU" in text


def test_doctor_names_every_symbol():
    with emulator.installed(missing=("bwd_dhu",)):
        rows = dict(ascend_rows())
    assert rows["hyper_parallel"] == "1.0.0 (emulated)"
    there = [name for name, text in rows.items() if text == "there"]
    assert len(there) == 9 and "has no npu_chunk_kda_bwd_dhu" in rows["npu_chunk_kda_bwd_dhu"]
    assert rows["final-state correction"].startswith("auto")


ROUTES = [
    ("configs/kimi_linear_npu8.yaml", [], ["stages: states are exchanged", "bwd_finalize    npu_chunk_kda_bwd_finalize", "merge_fwd_bwd"]),
    ("configs/kimi_linear_48b_npu.yaml", [], ["part of a graph", "in PyNative", "bwd_finalize    composite: safe_gate is False"]),
    ("configs/tiny_cp2.yaml", [], ["this is what Ascend would do", "Float32; the kernels take BFloat16"]),
    ("configs/kimi_linear_npu8.yaml", [("'state_scan'", "'ulysses'"), ("kda_safe_gate: True ", "kda_safe_gate: False")],
     ["fused: a raw softplus gate", "chunk_kda       npu_chunk_kda"]),
    ("configs/kimi_linear_npu8.yaml", [("'state_scan'", "'ulysses'")], ["stages: safe_gate with a raw gate"]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "changes", "says"), ROUTES)
def test_route_of_a_run_file(name, changes, says, tmp_path):
    text = (ROOT / name).read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with emulator.installed():
        found = "\n".join(route_lines(load_run_config(str(path))))
    assert all(text.lower() in found.lower() for text in says), found
    assert "not here" not in found


def test_route_says_what_is_missing(capsys):
    assert cli.main(["doctor", "--route", NPU8]) == 0
    text = capsys.readouterr().out
    assert text.count("(not here)") == 8 and text.count("hyper_parallel is not installed") == 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["doctor", "--route", "nowhere.yaml"], "nowhere.yaml: no such file"),
        (["selftest", "--device", "ascend"], "--device ascend: MindSpore finds no NPU here; allowed: cpu"),
        (["selftest", "--device", "cpu", "--goldens", "."], "--goldens = .: a folder with fla_kda_seed1.npz is needed"),
        (
            ["selftest", "--device", "cpu", "--report", "no/such/folder/x.md"],
            "--report = no/such/folder/x.md: a file in a folder that exists",
        ),
    ],
)
def test_refusals_are_one_line(arguments, says, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(arguments) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith(f"kcp: error: {says}")


def test_the_device_must_be_said(capsys):
    with pytest.raises(SystemExit) as raised:
        cli.main(["selftest"])
    assert raised.value.code == 2 and "--device" in capsys.readouterr().err


def test_selftest_checks_through_the_emulated_kernels():
    """What a machine with NPUs runs: both routes, the stages by hand, the precision gate."""
    with emulator.installed():
        rows = checks.stages()
        assert {"chunk_kda", *emulator.STAGES} <= set(emulator.calls)
        rows += checks.precision_gate(2)
    assert len(rows) == 9 and all("ascend" in row.note for row in rows)
    assert [row for row in rows if not row.passed] == []
    assert max(row.value for row in rows) > 1e-3  # bfloat16 caches


def test_selftest_sees_wrong_kernels():
    """A kernel that ignores the final state's gradient, as some versions of FLA-NPU do, fails."""

    def deaf(*tensors, dht=None, **options):
        return emulator.npu_chunk_kda_bwd_dhu(*tensors, **options)

    def signature(q, k, w, d_o, dv, scale, chunk_size=64, *, gk, h0=None, dht=None, cu_seqlens=None, chunk_indices=None, use_exp2=True,
                  state_v_first=False):  # fmt: skip
        return deaf(q, k, w, d_o, dv, scale, gk=gk, h0=h0, cu_seqlens=cu_seqlens, chunk_indices=chunk_indices)

    with emulator.installed(versions={"bwd_dhu": signature}):
        rows = checks.stages()
    assert {row.name for row in rows if not row.passed} >= {"op, lower-bound gate, states", "stages by hand"}


def test_report_of_a_failure(tmp_path):
    """A check that raises fails by itself, and the report says so."""
    found = report.Report("CPU")
    found.section("good", lambda: [checks.Row("a", 1.0, 2.0), checks.Row("b", 5.0, None, "ms")])
    found.section("bad", lambda: [checks.Row("c", float("nan"), 2.0), checks.Row("d", 3.0, 2.0)])
    found.section("broken", lambda: 1 / 0)
    assert found.failed == ["bad: c", "bad: d", "broken: ended by an error"]
    assert "ZeroDivisionError" in "\n".join(found.lines)


def test_golden_rows(monkeypatch):
    """The extract of a clone: within its limits, and beyond them when a result is wrong."""
    assert report.find_goldens(str(EXTRACT)) == EXTRACT
    rows = checks.goldens(EXTRACT, "CPU")
    assert len(rows) == 4 and all(row.passed for row in rows)
    run_op = checks.run_op
    monkeypatch.setattr(checks, "run_op", lambda call: {n: x * np.float32(1.01) for n, x in run_op(call).items()})
    assert not any(row.passed for row in checks.goldens(EXTRACT, "CPU"))


@pytest.mark.ci
def test_selftest_on_the_cpu(tmp_path):
    """The whole command, as a person runs it."""
    code = "import sys; sys.path.append(sys.argv.pop(1)); from kcp.cli import main; sys.exit(main(sys.argv[1:]))"
    arguments = ["selftest", "--device", "cpu", "--report", str(tmp_path / "report.md"), "--goldens", str(EXTRACT), "--seeds", "2"]
    done = subprocess.run(
        [sys.executable, "-c", code, str(ROOT), *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    text = (tmp_path / "report.md").read_text()
    assert "**passed**" in text and "FAILED" not in text
    for section in ("golden results", "routes and stages", "in one process", "among 2 processes", "among 4 processes", "precision gate"):
        assert section in text
