"""Watching the processes of a run: who is alive, how each ended, who failed first, what it said last.

Linux only: reads ``/proc``.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

RUN_ID = "KCP_RUN_ID"
_PROGRESS = re.compile(r"^(kcp: (?!error:)|step\b)")
_MSRUN_EXIT = re.compile(r"Worker process (\d+) exit with exception\. Error code: (-?\d+)")
_PEER_SYMPTOM = re.compile(
    r"time[d]? ?out|collective|all_?reduce|all_?gather|all_?to_?all|broadcast|disconnect|connection|\bpeer\b|hccl|"
    r"failed to (send|receive|recv)",
    re.IGNORECASE,
)
_MINDSPORE_ERROR = re.compile(r"\[(ERROR|CRITICAL)\] ")
_NOISE = re.compile(r"\[(WARNING|INFO|DEBUG)\] ")
_CALL_STACK = re.compile(r"- (C\+\+|The Function) Call Stack|#\s*0 In file|The function call stack")
_LOG_TAIL_BYTES = 1 << 16


@dataclass(frozen=True)
class Ending:
    """How one worker ended.

    Attributes:
        rank: of the worker.
        time: of the ending, seconds since the epoch (of its detection when it was killed).
        code: exit code; negative: the signal that killed it; None: unknown.
        error: one line of the exception, if there was one.
        where: file and line of the exception.
        finished: its target came to its end.
        pid: of the worker.
    """

    rank: int
    time: float
    code: int | None
    error: str = ""
    where: str = ""
    finished: bool = False
    pid: int = 0

    @property
    def bad(self) -> bool:
        """Whether this ending alone is a failure."""
        return self.code != 0 and not self.finished

    @property
    def peer_symptom(self) -> bool:
        """Whether the error looks like the consequence of another worker's."""
        return bool(self.error and _PEER_SYMPTOM.search(self.error))

    def describe(self) -> str:
        """The ending in words."""
        if self.error:
            return f"failed: {self.error}" + (f" ({self.where})" if self.where else "")
        if self.code is None:
            return "ended without leaving an exit code"
        if self.code == -signal.SIGSTOP:
            return "was stopped (SIGSTOP) and did not answer"
        if self.code < 0:
            return f"was killed by signal {-self.code} ({_signal_name(-self.code)})"
        if self.code == 0:
            return "left with exit code 0 while others were still at work"
        return f"left with exit code {self.code}"


class Watch:
    """Follows the records and the processes of the local workers.

    Args:
        status_dir: folder of the records that `kcp.launch_worker` writes.
        ranks: local ranks to follow.
        exit_code: exit code of a process that its parent has collected already, None when unknown.
    """

    def __init__(self, status_dir: Path, ranks: Iterable[int], exit_code: Callable[[int], int | None]) -> None:
        self.status_dir = status_dir
        self.ranks = tuple(ranks)
        self.exit_code = exit_code
        self.endings: dict[int, Ending] = {}
        self.gone: set[int] = set()
        self.stopped: set[int] = set()
        self.pids: dict[int, int] = {}

    def poll(self) -> None:
        """Look at every worker that has not ended yet."""
        for rank in self.ranks:
            if rank in self.gone:
                continue
            alive_before, status = self._process(rank)
            record = read_record(self.status_dir / f"worker_{rank}.json")
            if record is None:
                continue
            self.pids[rank] = record["pid"]
            if record["state"] != "running" and rank not in self.endings:
                self.endings[rank] = Ending(
                    rank,
                    record["time"],
                    record["code"],
                    record.get("error", ""),
                    record.get("where", ""),
                    record["state"] == "finished",
                    record["pid"],
                )
            if alive_before:
                continue
            self.gone.add(rank)
            if rank not in self.endings:
                code = status if status is not None else self.exit_code(record["pid"])
                self.endings[rank] = Ending(rank, time.time(), code, pid=record["pid"])

    @property
    def running(self) -> tuple[int, ...]:
        """Ranks that have not ended."""
        return tuple(rank for rank in self.ranks if rank not in self.endings)

    @property
    def all_gone(self) -> bool:
        """Whether every worker came to its end and its process is gone."""
        return len(self.gone) == len(self.ranks)

    def failed(self) -> bool:
        """Whether a worker ended badly."""
        return any(ending.bad for ending in self.endings.values())

    def left_early(self, grace: float) -> bool:
        """Whether a worker left with exit code 0 before its target's end, ``grace`` seconds before the others."""
        early = [e.time for e in self.endings.values() if not e.finished and e.code == 0]
        return bool(early and self.running and time.time() - min(early) > grace)

    def first_failure(self, noticed: Iterable[int] = ()) -> Ending | None:
        """The ending that the others follow from.

        Consequences come last: errors that speak of collectives and timeouts, and workers that msrun or MindSpore's heartbeat killed. A
        worker that left with exit code 0 before the first failure counts as one, one that is stopped as the cause of consequences.

        Args:
            noticed: process ids whose failure msrun noticed; what else was killed by SIGKILL then is its doing.
        """
        bad = [ending for ending in self.endings.values() if ending.bad]
        limit = min((ending.time for ending in bad), default=time.time())
        quiet = [e for e in self.endings.values() if e.code == 0 and e.time <= limit and (bad or not e.finished)]
        # A worker that came to its end is the cause only if its peers then waited for it in vain.
        quiet = [e for e in quiet if not e.finished or all(other.peer_symptom for other in bad)]
        noticed = set(noticed)

        def consequence(ending: Ending) -> bool:
            by_msrun = ending.code == -signal.SIGKILL and bool(noticed) and ending.pid not in noticed
            return ending.peer_symptom or by_msrun or ending.code == -signal.SIGTERM

        if self.stopped and bad and all(consequence(ending) for ending in bad):
            return self.stopped_worker(limit)
        return min(bad + quiet, key=lambda ending: (consequence(ending), ending.time), default=None)

    def stopped_worker(self, noticed_at: float) -> Ending | None:
        """The first worker that a signal has stopped, as the cause of what was noticed then; None when none is."""
        rank = min(self.stopped, default=None)
        return None if rank is None else Ending(rank, noticed_at, -signal.SIGSTOP, pid=self.pids[rank])

    def unanswered(self, first: Ending) -> tuple[int, ...]:
        """Ranks that were still at work when the first failure came."""
        return tuple(rank for rank in self.ranks if rank not in self.endings or self.endings[rank].time > first.time)

    def _process(self, rank: int) -> tuple[bool, int | None]:
        """Whether the worker's process is alive, and its exit code while its parent has not collected it."""
        pid = self.pids.get(rank)
        if pid is None:
            record = read_record(self.status_dir / f"worker_{rank}.json")
            if record is None:
                return True, None
            pid = self.pids[rank] = record["pid"]
        fields = stat_fields(pid)
        if fields is None:
            return False, None
        if fields[0] not in ("Z", "X"):
            if fields[0] == "T":
                self.stopped.add(rank)
            elif not self.failed():  # after a failure, what was stopped no longer is because it is being killed
                self.stopped.discard(rank)
            return True, None
        status = int(fields[-1])
        return False, -(status & 0x7F) if status & 0x7F else status >> 8


def msrun_exit_codes(log: Path) -> dict[int, int]:
    """Process id and exit code of the workers whose failure msrun noticed. It kills the others right after."""
    return {int(pid): int(code) for pid, code in _MSRUN_EXIT.findall(tail_text(log))}


def read_record(path: Path) -> dict | None:
    """A process's record, or None when there is none yet."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def stat_fields(pid: int) -> list[str] | None:
    """Fields of ``/proc/PID/stat`` from the state on, None when there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return None


def processes_of(run_id: str) -> list[int]:
    """Processes whose environment carries this run's id, zombies excluded."""
    marker, found = f"{RUN_ID}={run_id}".encode(), []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/environ", "rb") as file:
                marked = marker in file.read().split(b"\0")
        except OSError:
            continue
        fields = stat_fields(int(name)) if marked else None
        if fields and fields[0] not in ("Z", "X"):
            found.append(int(name))
    return found


def kill_run(run_id: str, grace: float = 0.0, patience: float = 15.0) -> list[int]:
    """End every process of a run: SIGTERM and ``grace`` seconds if wanted, then SIGKILL until none is left.

    Returns:
        Processes that are still there after ``patience`` seconds (none, unless the kernel holds them).
    """
    if grace > 0:
        _signal_all(processes_of(run_id), signal.SIGTERM)
        deadline = time.time() + grace
        while time.time() < deadline and processes_of(run_id):
            time.sleep(0.05)
    deadline = time.time() + patience
    while left := processes_of(run_id):
        if time.time() > deadline:
            return left
        _signal_all(left, signal.SIGKILL)
        time.sleep(0.05)
    return []


def tail_text(path: Path) -> str:
    """The last 64 KiB of a log."""
    try:
        with open(path, "rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - _LOG_TAIL_BYTES))
            return file.read().decode("utf-8", errors="replace")
    except OSError:
        return ""


def last_lines(path: Path, count: int = 15) -> list[str]:
    """The last lines of a log that say something: MindSpore's errors, then the last traceback without its C++ half."""
    lines = [line.rstrip() for line in tail_text(path).splitlines()]
    starts = [index for index, line in enumerate(lines) if line.startswith("Traceback (most recent call last)")]
    errors = [line for line in lines if _MINDSPORE_ERROR.match(line)][:2]
    if starts:
        lines = lines[starts[-1] :]
    ends = [index for index, line in enumerate(lines) if _CALL_STACK.match(line)]
    if starts and ends:
        lines = lines[: ends[0]]
    lines = [line for line in lines if line.strip(" -=") and line not in errors and not _NOISE.match(line)]
    return errors + lines[-count:]


class Relay:
    """Prints what rank 0 says as it says it: everything, or its progress lines."""

    def __init__(self, log: Path, everything: bool) -> None:
        self.log = log
        self.everything = everything
        self.position = 0
        self.rest = b""

    def pump(self) -> None:
        with contextlib.suppress(OSError), open(self.log, "rb") as file:
            file.seek(self.position)
            data = file.read()
            self.position += len(data)
            *lines, self.rest = (self.rest + data).split(b"\n")
            for line in lines:
                text = line.decode("utf-8", errors="replace")
                if self.everything or _PROGRESS.match(text):
                    print(text, flush=True)


def _signal_all(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"
