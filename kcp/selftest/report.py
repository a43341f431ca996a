"""The self-test as a command: runs the checks, prints them as they come, and writes one report file."""

from __future__ import annotations

import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path

DEVICES = {"cpu": "CPU", "ascend": "Ascend"}
STRATEGIES = "ulysses,state_scan,ptp_chain,ptp_tree"


def find_goldens(given: str | None) -> Path | None:
    """The folder of golden files: the one given, ``KCP_SHARED``/goldens, or the extract beside a clone of kcp."""
    clone = Path(__file__).resolve().parents[2]
    shared = os.environ.get("KCP_SHARED")
    places = [Path(given)] if given else [*([Path(shared) / "goldens"] if shared else []), clone / "tests" / "data"]
    return next((p for p in places if (p / "fla_kda_seed1.npz").exists()), None)


class Report:
    """Rows by section, printed as they come."""

    def __init__(self, device: str):
        self.device = device
        self.lines: list[str] = [f"# kcp self-test, {device}", ""]
        self.failed: list[str] = []
        self.skipped: list[str] = []

    def text(self, line: str) -> None:
        """A line of both the screen and the file."""
        print(line, flush=True)
        self.lines.append(line)

    def section(self, title: str, run: Callable) -> None:
        """Run one check; an exception fails it and does not end the test."""
        from kcp.selftest.checks import Row

        print(f"\n{title}", flush=True)
        self.lines += ["", f"## {title}", "", "| what | value | limit | | |", "|---|---|---|---|---|"]
        start = time.perf_counter()
        try:
            rows = run()
        except Exception as error:
            rows = [Row("ended by an error", float("nan"), 0.0, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")]
        for row in rows:
            verdict = "" if row.limit is None else "ok" if row.passed else "FAILED"
            limit = "" if row.limit is None else f"{row.limit:.3g}"
            print(f"  {row.name:<44}{row.value:>10.3g}  {limit:>8}  {verdict:<7}{row.note}", flush=True)
            note = row.note.replace("|", "/")
            self.lines.append(f"| {row.name} | {row.value:.4g} | {limit} | {verdict} | {note} |")
            if row.limit is not None and not row.passed:
                self.failed.append(f"{title}: {row.name}")
        self.lines += ["", f"{time.perf_counter() - start:.1f} s"]

    def skip(self, title: str, why: str) -> None:
        """Say that a check was not run."""
        self.skipped.append(title)
        self.text(f"\n{title}: not run, {why}")


def _environment(report: Report) -> None:
    import mindspore as ms

    from kcp import __version__
    from kcp.doctor_ascend import ascend_rows
    from kcp.ops import backends

    now = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    report.text(f"kcp {__version__}, MindSpore {ms.__version__}, Python {platform.python_version()}, {platform.machine()}, {now}")
    for stage, served_by, reasons in backends.describe():
        why = "; ".join(f"not {name}: {reason}" for name, reason in reasons.items())
        report.lines.append(f"- {stage}: {served_by} ({why})" if why else f"- {stage}: {served_by}")
    report.lines += [f"- {name}: {text}" for name, text in ascend_rows()]


def _processes(device: str, workers: int, tensor_parallel: int = 1):
    """Rows of a launch of ``workers`` processes."""
    from kcp.launch import LaunchOptions, launch
    from kcp.selftest.checks import BF16_LIMIT, Row, worst

    rows = []
    with tempfile.TemporaryDirectory(prefix="kcp_selftest_") as name:
        arguments = ["--device", device, "--folder", name, "--strategies", STRATEGIES, "--tensor-parallel", str(tensor_parallel)]
        options = LaunchOptions(workers=workers, log_dir=Path(name) / "logs", bind_devices=device == "Ascend", pin=device == "Ascend")
        code = launch(["kcp.selftest.ranks", *arguments], options)
        what = f"{workers} processes" if tensor_parallel == 1 else f"TP {tensor_parallel} x CP {workers // tensor_parallel}"
        if code != 0:
            return [Row(what, float("nan"), 0.0, f"the launch ended with {code}; what failed was said above")]
        found = [json.loads((Path(name) / f"errors_{r}.json").read_text()) for r in range(workers)]
    for strategy in STRATEGIES.split(","):
        largest = {n: max(rank[strategy][n] for rank in found) for n in found[0][strategy]}
        rows.append(worst(f"{strategy}, {what}", largest, 5e-5 if device == "CPU" else BF16_LIMIT, "against one rank"))
    return rows


def run(device: str, file: str | None = None, goldens: str | None = None, seeds: int = 20, tokens: int | None = None) -> int:
    """Run everything that this machine has room for.

    Args:
        device: ``"cpu"`` or ``"ascend"``.
        file: the report; by default ``kcp-selftest-DEVICE.md`` here.
        goldens: folder of golden files.
        seeds: of the precision gate.
        tokens: of the timings.

    Returns:
        Exit code: 0 passed, 1 something failed, 2 the device is not there.
    """
    os.environ.setdefault("GLOG_v", "3")
    import mindspore as ms

    target = DEVICES[device]
    devices = [name for name in os.listdir("/dev") if name.startswith("davinci") and name[7:].isdigit()] if target == "Ascend" else []
    if target == "Ascend" and not ms.hal.is_available("Ascend"):
        print("kcp: error: --device ascend: MindSpore finds no NPU here; allowed: cpu, or a machine with NPUs and CANN", file=sys.stderr)
        return 2
    ms.set_device(target)
    ms.set_context(mode=ms.PYNATIVE_MODE)
    if target == "CPU":
        ms.runtime.launch_blocking()

    from kcp.selftest import checks

    report = Report(target)
    _environment(report)
    # processes first, while this one holds no NPU
    for workers in (2,) if target == "CPU" else [n for n in (2, 4, 8) if n <= len(devices)]:
        report.section(f"context parallelism among {workers} processes", lambda n=workers: _processes(target, n))
    if target == "CPU" or len(devices) >= 4:
        report.section("tensor x context parallelism among 4 processes", lambda: _processes(target, 4, 2))
    else:
        report.skip("tensor x context parallelism among 4 processes", f"it needs 4 NPUs, here are {len(devices)}")
    folder = find_goldens(goldens)
    title = "golden results of a peer (FLA's Triton kernels, bfloat16)"
    if folder is None:
        report.skip(title, "no fla_kda_seed1.npz; give its folder by --goldens or KCP_SHARED")
    else:
        report.section(title, lambda: checks.goldens(folder, target))
    report.section("routes and stages against a float64 recurrence", checks.stages)
    report.section("context parallelism in one process", lambda: checks.lockstep_ranks(target))
    report.section("precision gate", lambda: checks.precision_gate(seeds))
    sizes = (tokens or 1024, 2) if target == "CPU" else (tokens or 8192, 32)
    report.section("timings (medians, for information)", lambda: checks.timings(*sizes))

    outcome = f"FAILED: {'; '.join(report.failed)}" if report.failed else "passed"
    report.lines[1:1] = ["", f"**{outcome}**" + (f", not run: {'; '.join(report.skipped)}" if report.skipped else "")]
    path = Path(file or f"kcp-selftest-{device}.md")
    path.write_text("\n".join(report.lines) + "\n", encoding="utf-8")
    print(f"\nkcp: self-test on {target}: {outcome}; report: {path}")
    return 1 if report.failed else 0
