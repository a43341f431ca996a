"""Run a script in several MindSpore processes under ``msrun``, with a time limit and nothing left behind.

    outputs = run_workers(SCRIPT, workers=2, args=["--strategy", "ulysses"], timeout=120)

``SCRIPT`` is Python source, a path that ends in ``.py``, or ``"-m package.module"``. ``outputs[rank]`` is all that the
worker of that rank printed. When a worker fails, :class:`WorkerError` carries the last lines of the first one that did.
"""

import os
import random
import re
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

REPO = Path(__file__).resolve().parent.parent
_MARK = "KCP_TEST_LAUNCH"
_FAILED_WORKER = re.compile(r"Worker process (\d+) exit with exception. Error code: (-?\d+)")


class WorkerError(RuntimeError):
    """A worker ended with an error, or the time limit passed.

    Attributes:
        outputs: What every worker printed until then, in rank order.
        rank: The worker blamed; None when the time limit passed.
    """

    def __init__(self, message: str, outputs: list[str], rank: int | None = None):
        super().__init__(message)
        self.outputs = outputs
        self.rank = rank


def free_port() -> int:
    """A TCP port free at this moment, below the range that the kernel gives to outgoing connections."""
    while True:
        port = random.randint(20000, 32000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


def tail(text: str, lines: int = 25) -> str:
    """The last non-empty lines of a log."""
    return "\n".join([line for line in text.splitlines() if line.strip()][-lines:])


def processes_of(mark: str) -> list[psutil.Process]:
    """Processes whose launch mark starts with ``mark``: ``f"{os.getpid()}-"`` finds all that this process launched."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(_MARK, "").startswith(mark):
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return found


def _kill_all(mark: str) -> None:
    for _ in range(5):
        left = processes_of(mark)
        if not left:
            return
        for process in left:
            try:
                process.kill()
            except psutil.Error:
                continue
        psutil.wait_procs(left, timeout=2)


def _command(script: str | Path, folder: Path) -> list[str]:
    text = str(script)
    if text.startswith("-m "):
        return ["python", *text.split()]
    if "\n" not in text and text.endswith(".py"):
        return ["python", str(Path(text).resolve())]
    path = folder / "worker.py"
    path.write_text(text, encoding="utf-8")
    return ["python", str(path)]


def run_workers(
    script: str | Path,
    workers: int,
    args: Sequence[str] = (),
    timeout: float = 120,
    *,
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
) -> list[str]:
    """Run ``script`` in ``workers`` processes that form one MindSpore cluster on this machine.

    Args:
        script: Python source, a path ending in ``.py``, or ``"-m package.module"``.
        workers: Number of processes; 1 also runs under msrun, as a cluster of one.
        args: Command line arguments of every worker.
        timeout: Seconds after which everything is killed.
        env: Environment variables added to this process's own.
        cwd: Working directory of the workers; a temporary folder by default.

    Returns:
        What each worker printed (both streams), in rank order.

    Raises:
        WorkerError: A worker ended with an error, or the time limit passed. No process is left in either case.
    """
    mark = f"{os.getpid()}-{uuid.uuid4().hex}"
    with tempfile.TemporaryDirectory(prefix="kcp_msrun_") as name:
        folder = Path(name)
        logs = folder / "logs"
        # A collective waits for the slowest rank, which may still be compiling its graph on a busy machine.
        defaults = {"GLOG_v": "3", "MS_CPU_COMM_OP_TIMEOUT": "120"}
        environment = {**os.environ, **defaults, **(env or {}), _MARK: mark}
        scripts = str(Path(sys.executable).parent)
        environment["PATH"] = os.pathsep.join([scripts, environment.get("PATH", "")])
        paths = [str(REPO), str(REPO / "tests"), environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
        launch = [str(Path(scripts) / "msrun"), f"--worker_num={workers}", f"--local_worker_num={workers}"]
        launch += ["--master_addr=127.0.0.1", f"--master_port={free_port()}", f"--log_dir={logs}"]
        launch += ["--join=True", "--tail_worker_log=-1", f"--cluster_time_out={int(timeout)}"]
        launch += [*_command(script, folder), *map(str, args)]
        own_log = folder / "msrun.log"
        failed = None
        try:
            with own_log.open("w") as stream:
                process = subprocess.Popen(launch, stdout=stream, stderr=subprocess.STDOUT, env=environment, cwd=str(cwd or folder))
            deadline = time.monotonic() + timeout
            while process.poll() is None and time.monotonic() < deadline and failed is None:
                time.sleep(0.2)
                failed = _FAILED_WORKER.search(own_log.read_text(errors="replace"))
            if failed is None:
                failed = _FAILED_WORKER.search(own_log.read_text(errors="replace"))
            code = process.poll()
        finally:
            _kill_all(mark)
            process.wait(timeout=10)
        outputs = []
        for rank in range(workers):
            log = logs / f"worker_{rank}.log"
            outputs.append(log.read_text(errors="replace") if log.exists() else "")
        if failed is not None:
            rank = _first_to_fail(outputs)
            raise WorkerError(f"worker {rank} failed:\n{tail(outputs[rank])}", outputs, rank)
        if code is None:
            said = "\n".join(f"-- worker {rank}\n{tail(text, 8)}" for rank, text in enumerate(outputs))
            raise WorkerError(f"no end after {timeout} s:\n{said}", outputs)
        if code != 0:
            raise WorkerError(f"msrun ended with {code}:\n{tail(own_log.read_text(errors='replace'))}", outputs)
        return outputs


def _first_to_fail(outputs: list[str]) -> int:
    """The worker whose log shows an error of its own; a worker that only lost its peer comes second."""
    errors = ("Traceback (most recent call last)", "kcp: error:", "Error: ", "core dumped")
    lost_peer = re.compile(r"CollectiveError|connection|timed? ?out|collective", re.IGNORECASE)
    guesses = [rank for rank, text in enumerate(outputs) if any(word in text for word in errors)]
    own = [rank for rank in guesses if not lost_peer.search(tail(outputs[rank], 3))]
    return (own or guesses or [0])[0]
