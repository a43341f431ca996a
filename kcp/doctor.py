"""``kcp doctor``: what is installed, which devices there are, which backend serves which stage and why not another."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import sys
from collections.abc import Iterable

from kcp import __version__

REQUIRED = ("mindspore", "mindformers", "numpy", "PyYAML", "matplotlib")
OPTIONAL = {"hyper-parallel": "fused kernels on Ascend"}


def report() -> int:
    """Print everything; 1 when training can't work here, else 0."""
    problems: list[str] = []
    # Being asked for a device that is not there is not worth MindSpore's warnings here.
    os.environ.setdefault("GLOG_v", "3")
    _print_table("versions", _versions(problems))
    _print_table("devices", _devices(problems))
    _print_table("backends (which one serves each stage)", _backends(problems))
    _print_table("Ascend (Hyper-Parallel's kernels; docs/ascend.md)", _ascend())
    for problem in problems:
        print(f"kcp: problem: {problem}")
    print("kcp: training can't work here" if problems else "kcp: ready to train")
    return 1 if problems else 0


def _versions(problems: list[str]) -> list[tuple[str, str]]:
    rows = [("kcp", __version__), ("python", f"{platform.python_version()}, {sys.platform} {platform.machine()}")]
    for name in REQUIRED:
        version = _version(name)
        if version is None:
            problems.append(f"{name} is not installed; pip install kcp-mindspore brings it")
        rows.append((name, version or "missing"))
    rows += [(name, _version(name) or f"not installed ({purpose})") for name, purpose in OPTIONAL.items()]
    numpy = _version("numpy")
    if numpy and int(numpy.split(".")[0]) >= 2:
        problems.append(f"numpy {numpy}: MindSpore 2.9 needs numpy < 2")
    return rows


def _devices(problems: list[str]) -> list[tuple[str, str]]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    rows = [("CPU", f"{cores} cores for this process")]
    memory = _memory_gib()
    if memory:
        rows.append(("memory", f"{memory:.1f} GiB"))
    nodes = [name for name in _listdir("/dev") if name.startswith("davinci") and name[7:].isdigit()]
    rows.append(("Ascend", f"{len(nodes)} NPUs" if nodes else "none (no /dev/davinci*)"))
    if _version("mindspore"):
        rows.append(("MindSpore", _mindspore_targets(problems)))
    rows.append(("C++ compiler", shutil.which("c++") or shutil.which("g++") or "none (native CPU kernels need one)"))
    return rows


def _mindspore_targets(problems: list[str]) -> str:
    try:
        import mindspore as ms

        return "runs on " + ", ".join(name for name in ("CPU", "Ascend") if ms.hal.is_available(name))
    except Exception as error:
        problems.append(f"mindspore can't be imported: {_one_line(error)}")
        return "can't be imported"


def _backends(problems: list[str]) -> list[tuple[str, str]]:
    try:
        from kcp.ops import backends

        described = backends.describe()
    except Exception as error:
        problems.append(f"kcp.ops.backends can't be asked: {_one_line(error)}")
        return []
    rows = []
    for stage, served_by, reasons in described:
        why = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        rows.append((stage, f"{served_by}" + (f"  (not {why})" if why else "")))
        if served_by == "-":
            problems.append(f"no backend serves {stage}: {why}")
    return rows


def _ascend() -> list[tuple[str, str]]:
    try:
        from kcp.doctor_ascend import ascend_rows

        return ascend_rows()
    except Exception as error:
        return [("can't be asked", _one_line(error))]


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _memory_gib() -> float | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    except (ValueError, OSError):
        return None


def _listdir(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: " + " ".join(str(error).split())[:200]


def _print_table(title: str, rows: Iterable[tuple[str, str]]) -> None:
    rows = list(rows)
    print(title)
    width = max((len(name) for name, _ in rows), default=0)
    for name, text in rows:
        print(f"  {name:<{width}}  {text}")
