"""What the launcher starts in every process: sets the process up, runs the target, leaves a record of how it ended.

Run by path, not by import, so that the working folder is never on the import path (a folder named ``configs`` there
would stand in for the one that MindFormers reads).

    python .../kcp/launch_worker.py TARGET [ARGUMENTS]

TARGET is a module with ``main(argv) -> int``, or a script ending in ``.py``. Environment, set by `kcp.launch`:

    KCP_RUN_STATUS_DIR  folder of the records, one JSON file a process
    KCP_WORKER_CORES    core sets of the local workers, "0,1|2,3"; empty: not pinned

A record goes running -> finished | failed | exited. A process that is gone while its record says running was killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import json
import os
import re
import runpy
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

STATUS_DIR = "KCP_RUN_STATUS_DIR"
CORES = "KCP_WORKER_CORES"
SCHEDULER = "scheduler"
LINGER_SECONDS = 3.0
_PR_SET_PDEATHSIG = 1


def write_record(folder: Path, name: str, record: dict[str, Any]) -> None:
    """Write a process's record; a reader sees the old one or the new one, never half of it."""
    temporary = folder / f".{name}.{os.getpid()}"
    temporary.write_text(json.dumps(record), encoding="utf-8")
    os.replace(temporary, folder / f"{name}.json")


def die_with_parent() -> None:
    """Ask the kernel to kill this process when the one that started it dies; without effect where Linux is missing."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() == 1:
        os._exit(1)


def main(argv: list[str]) -> None:
    """Run the target of a worker, or the scheduler, and record how it ends. Does not return after a failure."""
    die_with_parent()
    folder = Path(os.environ[STATUS_DIR])
    scheduler = os.environ.get("MS_ROLE") == "MS_SCHED"
    rank = int(os.environ.get("RANK_ID", "0"))
    name = SCHEDULER if scheduler else f"worker_{rank}"
    record: dict[str, Any] = {"rank": rank, "pid": os.getpid(), "state": "running", "time": time.time()}
    write_record(folder, name, record)
    try:
        _pin(scheduler)
        code = _schedule() if scheduler else _run(argv)
        state = "finished" if code == 0 else "exited"
    except SystemExit as leave:
        state, code = "exited", _exit_code(leave)
    except BaseException as error:
        traceback.print_exc()
        state, code = "failed", 1
        record.update(error=_summary(error), where=_where(error))
    record.update(state=state, code=code, time=time.time())
    write_record(folder, name, record)
    sys.stdout.flush()
    sys.stderr.flush()
    if code != 0:
        if "MS_ROLE" in os.environ:
            # The launcher reads the record at once; msrun, which kills the other workers, should not be faster.
            time.sleep(LINGER_SECONDS)
        # The usual shutdown of a worker waits for its peers, who wait for it.
        os._exit(code)


def _pin(scheduler: bool) -> None:
    sets = os.environ.get(CORES, "")
    if scheduler or not sets:
        return
    local = sets.split("|")[int(os.environ.get("DEVICE_ID", "0"))]
    os.sched_setaffinity(0, {int(core) for core in local.split(",")})


def _schedule() -> int:
    from mindspore.communication import init

    init()
    return 0


def _run(argv: list[str]) -> int:
    target = argv[0]
    if target.endswith(".py"):
        sys.argv = list(argv)
        sys.path.insert(0, str(Path(target).resolve().parent))
        runpy.run_path(target, run_name="__main__")
        return 0
    _find_package()
    sys.argv = list(argv)
    return int(importlib.import_module(target).main(argv[1:]) or 0)


def _find_package() -> None:
    """Make ``import kcp`` find the package that this file is part of."""
    package = Path(__file__).resolve().parent
    spec = importlib.util.spec_from_file_location("kcp", package / "__init__.py", submodule_search_locations=[str(package)])
    module = importlib.util.module_from_spec(spec)
    sys.modules["kcp"] = module
    spec.loader.exec_module(module)


def _exit_code(leave: SystemExit) -> int:
    if leave.code is None:
        return 0
    if isinstance(leave.code, int):
        return leave.code & 0xFF
    print(leave.code, file=sys.stderr)
    return 1


def _summary(error: BaseException) -> str:
    """The error in a line; MindSpore's underlined headings are passed over, and what it says around an error of a dataset's own code."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip(" -")]
    lines = [line for line in lines if not (line.startswith("- ") and line.endswith(":"))]
    if lines and lines[0].startswith("Exception thrown from user defined Python function"):
        causes = [line for line in lines[1:] if re.match(r"\w+(Error|Exception): ", line)]
        return f"while reading data: {causes[-1]}" if causes else lines[0]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _where(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].filename}, line {frames[-1].lineno}" if frames else ""


if __name__ == "__main__":
    if sys.path[0] == str(Path(__file__).resolve().parent):
        sys.path.pop(0)
    main(sys.argv[1:])
