"""kcp's launcher: starts the workers of a run, one process each, and ends all of them when one fails.

One worker is started directly, several through MindSpore's `msrun`. msrun alone reacts slowly, does not see a worker
that leaves with exit code 0 and hangs when its port is in use; so the launcher picks the port and watches the workers:

- every worker leaves a record of how it ended (`kcp.launch_worker`); one that is gone without a record was killed;
- the first failure ends the run within seconds, and that worker's last lines are what the user reads;
- no process outlives the run, not even when the launcher is killed (each asks the kernel to die with its parent).
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from kcp.launch_watch import RUN_ID, Ending, Relay, Watch, kill_run, last_lines, msrun_exit_codes, read_record, tail_text
from kcp.launch_worker import CORES, SCHEDULER, STATUS_DIR

USER_ERROR = "kcp: error: "
POLL_SECONDS = 0.1
SETTLE_SECONDS = 1.0
EARLY_EXIT_GRACE = 15.0
TEARDOWN_GRACE = 30.0
# Bounds a collective's wait where MindSpore reads it (2.9.0 waits 30 s whatever it says).
COMM_TIMEOUT_SECONDS = 180
PORT_ATTEMPTS = 3
PORT_TAKEN = ("Address already in use", "Failed to init the tcp server")  # which of them the log has depends on its level
INTERRUPTED = 130
LINE_WIDTH = 300
# msrun without the working folder on its import path.
_MSRUN = "import sys; sys.path = [p for p in sys.path if p]; from mindspore.parallel.cluster.run import main; main()"


class LaunchError(ValueError):
    """The launch can't be done as asked; one line."""


@dataclass(frozen=True)
class LaunchOptions:
    """How a run is started.

    Attributes:
        workers: processes of the whole run.
        local_workers: processes on this machine; None: all.
        master_addr: address of the machine of node 0.
        master_port: its port; None picks a free one (only when all workers are on this machine).
        node_rank: number of this machine.
        log_dir: folder for worker_N.log, scheduler.log, msrun.log and the records.
        pin: give every local worker cores of its own.
        bind_devices: leave pinning to msrun, which knows which cores are near which NPU.
        startup_timeout: seconds that msrun waits for all workers to meet.
        verbose: relay all of rank 0's output, not only its progress lines.
    """

    workers: int
    log_dir: Path
    local_workers: int | None = None
    master_addr: str = "127.0.0.1"
    master_port: int | None = None
    node_rank: int = 0
    pin: bool = True
    bind_devices: bool = False
    startup_timeout: int = 600
    verbose: bool = False

    def __post_init__(self) -> None:
        local = self.local
        if self.workers < 1:
            raise LaunchError(f"--workers = {self.workers}: at least 1 is needed")
        if not 1 <= local <= self.workers:
            raise LaunchError(f"--local-worker-num = {local}: 1 to {self.workers} (all workers) is needed")
        if self.workers % local:
            raise LaunchError(f"--local-worker-num = {local}: a divisor of --worker-num = {self.workers} is needed")
        if not 0 <= self.node_rank < self.workers // local:
            raise LaunchError(f"--node-rank = {self.node_rank}: 0 to {self.workers // local - 1} is needed")
        if self.master_port is None and local < self.workers:
            raise LaunchError("--master-port: needed when the workers are on several machines, the same on all of them")
        if self.master_port is not None and not 1024 <= self.master_port <= 65535:
            raise LaunchError(f"--master-port = {self.master_port}: 1024 to 65535 is needed")

    @property
    def local(self) -> int:
        """Processes on this machine."""
        return self.workers if self.local_workers is None else self.local_workers

    @property
    def ranks(self) -> range:
        """Ranks on this machine."""
        return range(self.node_rank * self.local, (self.node_rank + 1) * self.local)


def launch(target: Sequence[str], options: LaunchOptions) -> int:
    """Run a target in every worker and wait for the end.

    Args:
        target: a module with ``main(argv) -> int`` or a script ending in ``.py``, then its arguments.
        options: how many workers, where.

    Returns:
        0 when every worker came to its end; 2 when the workers refused the user's input; 130 after Ctrl-C or SIGTERM;
        1 otherwise. What failed first has been said on stderr.

    Raises:
        LaunchError: the port is in use, or the log folder can't be written.
    """
    if options.master_port is not None and options.node_rank == 0 and not _port_is_free(options.master_port):
        raise LaunchError(f"--master-port = {options.master_port}: in use, choose another one or leave it out")
    attempts = PORT_ATTEMPTS if options.master_port is None else 1
    for attempt in range(attempts):
        chosen = options
        if options.master_port is None and options.workers > 1:
            chosen = replace(options, master_port=free_port())
        code = _Run(target, chosen).execute(last_attempt=attempt == attempts - 1)
        if code is not None:
            return code
    return 1


def free_port() -> int:
    """A port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def core_sets(workers: int, cores: Sequence[int]) -> list[list[int]]:
    """Cores of each of several workers: equal shares, or one core in turn when there are fewer cores than workers."""
    share = len(cores) // workers
    if share == 0:
        return [[cores[index % len(cores)]] for index in range(workers)]
    return [list(cores[index * share : (index + 1) * share]) for index in range(workers)]


@dataclass
class _Run:
    """One attempt to run the target."""

    target: Sequence[str]
    options: LaunchOptions
    run_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    interrupted: bool = False

    def execute(self, last_attempt: bool) -> int | None:
        """Exit code, or None when the port was taken in the meantime and another attempt is due."""
        log_dir = self.options.log_dir
        _prepare(log_dir)
        relay = Relay(log_dir / "worker_0.log", self.options.verbose) if 0 in self.options.ranks else None
        self.started = time.time()
        with _signals(self._interrupt):
            parent = self._start()
            single = self.options.workers == 1
            exit_code = (lambda _: parent.poll()) if single else (lambda pid: self._noticed().get(pid))
            self.watch = Watch(log_dir / "status", self.options.ranks, exit_code)
            try:
                while not self._over(parent):
                    if relay:
                        relay.pump()
                    time.sleep(POLL_SECONDS)
                if self.watch.failed():
                    self._settle(relay)
                if not self.watch.failed() and self.watch.all_gone and not self.interrupted:
                    self._wait_for_other_nodes(parent)
            finally:
                left = kill_run(self.run_id, grace=1.0 if self.interrupted else 0.0)
                _reap(parent)
                if relay:
                    relay.pump()
                if left:
                    _say(f"kcp: warning: processes {left} can't be killed")
        if self._port_taken() and not last_attempt:
            return None
        return self._verdict(parent.returncode)

    def _start(self) -> subprocess.Popen:
        options, log_dir = self.options, self.options.log_dir
        worker = [str(Path(__file__).with_name("launch_worker.py")), *self.target]
        environment = self._environment()
        if options.workers == 1:
            command, log = [sys.executable, *worker], log_dir / "worker_0.log"
            environment["RANK_ID"] = "0"
        else:
            command = [sys.executable, "-c", _MSRUN, *self._msrun_arguments(), "python", *worker]
            log = log_dir / "msrun.log"
        with open(log, "wb") as output:
            return subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,
                preexec_fn=_die_with_launcher,
            )

    def _msrun_arguments(self) -> list[str]:
        options = self.options
        return [
            f"--worker_num={options.workers}",
            f"--local_worker_num={options.local}",
            f"--master_addr={options.master_addr}",
            f"--master_port={options.master_port}",
            f"--node_rank={options.node_rank}",
            f"--log_dir={options.log_dir}",
            f"--cluster_time_out={options.startup_timeout}",
            f"--bind_core={options.bind_devices}",
            "--join=True",
            # A rank that does not exist: msrun would otherwise start a `tail` for every worker.
            "--tail_worker_log=65535",
        ]

    def _environment(self) -> dict[str, str]:
        options = self.options
        environment = dict(os.environ)
        for name in ("RANK_ID", "RANK_SIZE", "MS_ROLE", "MS_WORKER_NUM", "DEVICE_ID", "MS_NODE_ID"):
            environment.pop(name, None)
        environment[RUN_ID] = self.run_id
        environment[STATUS_DIR] = str((options.log_dir / "status").resolve())
        environment["PYTHONUNBUFFERED"] = "1"
        # msrun starts `python`: it has to be this interpreter.
        environment["PATH"] = os.pathsep.join([_python_folder(), environment.get("PATH", os.defpath)])
        environment.setdefault("MS_CPU_COMM_OP_TIMEOUT", str(COMM_TIMEOUT_SECONDS))
        if options.pin and not options.bind_devices and options.local > 1:
            sets = core_sets(options.local, sorted(os.sched_getaffinity(0)))
            environment[CORES] = "|".join(",".join(map(str, cores)) for cores in sets)
            environment.setdefault("OMP_NUM_THREADS", str(len(sets[0])))
        return environment

    def _over(self, parent: subprocess.Popen) -> bool:
        ended = parent.poll() is not None
        self.watch.poll()
        if self.interrupted or self.watch.failed() or self.watch.all_gone:
            return True
        if self.watch.left_early(EARLY_EXIT_GRACE) or self._teardown_hangs():
            return True
        return ended or self._scheduler_failed()

    def _teardown_hangs(self) -> bool:
        """Whether every worker came to its end long ago and a process still does not leave."""
        endings = self.watch.endings.values()
        done = len(endings) == len(self.options.ranks) and all(ending.finished for ending in endings)
        return done and time.time() - max(ending.time for ending in endings) > TEARDOWN_GRACE

    def _settle(self, relay: Relay | None) -> None:
        """Give other workers a moment to leave their records, so that the first failure is the first."""
        deadline = time.time() + SETTLE_SECONDS
        while time.time() < deadline and not self.watch.all_gone:
            self.watch.poll()
            if relay:
                relay.pump()
            time.sleep(POLL_SECONDS)

    def _wait_for_other_nodes(self, parent: subprocess.Popen) -> None:
        """The scheduler serves the workers of other machines to their end."""
        while self.options.local < self.options.workers and parent.poll() is None and not self.interrupted:
            time.sleep(POLL_SECONDS)

    def _scheduler_failed(self) -> bool:
        """Whether the process that the workers meet at could not start: they would wait for it until msrun's own limit."""
        record = read_record(self.options.log_dir / "status" / f"{SCHEDULER}.json")
        return self.options.workers > 1 and bool(record) and record["state"] == "failed"

    def _port_taken(self) -> bool:
        log = tail_text(self.options.log_dir / "scheduler.log") if self._scheduler_failed() else ""
        return any(words in log for words in PORT_TAKEN)

    def _verdict(self, parent_code: int | None) -> int:
        log_dir, watch = self.options.log_dir, self.watch
        if self.interrupted:
            _say("kcp: interrupted; all workers were stopped")
            return INTERRUPTED
        if self._scheduler_failed() and not watch.failed():
            # The scheduler ends when a worker's heartbeat is missing for long.
            stopped = watch.stopped_worker(time.time())
            if stopped is None:
                return self._nothing_recorded(parent_code)
            self._report(stopped, log_dir / f"worker_{stopped.rank}.log")
            return 1
        first = watch.first_failure(self._noticed()) if watch.failed() or watch.running else None
        if first is None and not watch.running:
            return 0
        if first is None:
            return self._nothing_recorded(parent_code)
        log = log_dir / f"worker_{first.rank}.log"
        refusals = [line for line in tail_text(log).splitlines() if line.startswith(USER_ERROR)]
        if first.code == 2 and refusals:
            for line in dict.fromkeys(refusals):
                _say(line)
            return 2
        self._report(first, log)
        return 1

    def _report(self, first: Ending, log: Path) -> None:
        seconds = max(0.0, first.time - self.started)
        others = " The other workers were stopped." if self.options.workers > 1 else ""
        _say(f"{USER_ERROR}worker {first.rank} (pid {first.pid}) {first.describe()}, after {seconds:.0f} s.{others}")
        waiting = ", ".join(str(rank) for rank in self.watch.unanswered(first))
        if first.peer_symptom and waiting:
            _say(f"kcp: it waited for other workers; worker {waiting} was still at work and did not answer")
        if first.code == -signal.SIGKILL:
            _say("kcp: SIGKILL comes from outside: often from the kernel when memory runs out (see: dmesg)")
        lines = last_lines(log)
        _say(f"kcp: its last lines, from {log}:" if lines else f"kcp: it left no error lines in {log}")
        for line in lines:
            _say(f"  | {line[:LINE_WIDTH]}")

    def _nothing_recorded(self, parent_code: int | None) -> int:
        """No worker says why: the launch itself failed."""
        log_dir = self.options.log_dir
        if self._port_taken():
            _say(f"{USER_ERROR}--master-port = {self.options.master_port}: in use, choose another one")
            return 2
        name = "worker_0.log" if self.options.workers == 1 else "msrun.log"
        what = "msrun ended while workers were at work" if self.watch.pids else "the workers could not be started"
        scheduler = read_record(log_dir / "status" / f"{SCHEDULER}.json") or {}
        if self._scheduler_failed():
            lost = "timed out node" in scheduler.get("error", "")
            what = "the scheduler lost a worker" if lost else "the scheduler could not start"
        _say(f"{USER_ERROR}{what} (exit code {parent_code}); last lines of {log_dir / name}:")
        for line in [scheduler.get("error", ""), *last_lines(log_dir / name)]:
            if line:
                _say(f"  | {line}")
        return 1

    def _noticed(self) -> dict[int, int]:
        return msrun_exit_codes(self.options.log_dir / "msrun.log")

    def _interrupt(self) -> None:
        self.interrupted = True


@contextlib.contextmanager
def _signals(interrupt: Callable[[], None]):
    """Turn Ctrl-C, SIGTERM and SIGHUP into an interrupt of the run while it lasts."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    heeded = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, lambda *_: interrupt()) for number in heeded}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _die_with_launcher() -> None:
    from kcp.launch_worker import die_with_parent

    die_with_parent()


def _prepare(log_dir: Path) -> None:
    """An empty status folder, and no logs of an earlier run."""
    try:
        (log_dir / "status").mkdir(parents=True, exist_ok=True)
        old = [*(log_dir / "status").iterdir(), *log_dir.glob("worker_*.log")]
        for path in [*old, log_dir / "scheduler.log", log_dir / "msrun.log"]:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise LaunchError(f"log folder {log_dir}: can't be written: {error.strerror}") from None


def _port_is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def _python_folder() -> str:
    return os.path.dirname(os.path.abspath(sys.executable))


def _reap(parent: subprocess.Popen) -> None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        parent.wait(timeout=5)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
