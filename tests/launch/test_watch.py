"""Who failed first, from records alone; cores; options."""

import os
import signal
import subprocess
import sys
import time

import pytest

from kcp.launch import LaunchError, LaunchOptions, _Run, core_sets
from kcp.launch_watch import Ending, Watch, last_lines, msrun_exit_codes
from kcp.launch_worker import SCHEDULER, write_record

KILLED = -signal.SIGKILL


def watch_of(*endings, ranks=None):
    watch = Watch("unused", range(len(endings)) if ranks is None else ranks, lambda pid: None)
    watch.endings = {ending.rank: ending for ending in endings}
    return watch


def test_earliest_failure_is_first():
    watch = watch_of(Ending(0, 12.0, 1, "ValueError: x"), Ending(1, 11.0, KILLED))
    assert watch.first_failure().rank == 1


@pytest.mark.parametrize(
    "error",
    [
        "RuntimeError: Launch kernel failed, name:Default/AllReduce-op0",
        "RuntimeError: Ring ReduceScatter wait receiving timed out",
        "RuntimeError: Connection reset by peer",
    ],
)
def test_what_follows_from_a_peer_comes_last_although_it_was_seen_earlier(error):
    watch = watch_of(Ending(0, 10.0, 1, error), Ending(1, 10.1, KILLED, pid=7))
    assert watch.first_failure().rank == 1
    assert watch.first_failure(noticed=[7]).rank == 1


def test_workers_killed_by_msrun_are_not_the_first():
    watch = watch_of(Ending(0, 10.0, KILLED, pid=6), Ending(1, 10.0, KILLED, pid=7))
    assert watch.first_failure(noticed=[7]).rank == 1
    assert watch.first_failure(noticed=[6]).rank == 0


def test_exit_zero_before_the_peers_failed_is_first():
    late = Ending(0, 40.0, 1, "RuntimeError: AllReduce failed")
    assert watch_of(late, Ending(1, 10.0, 0)).first_failure().rank == 1
    assert watch_of(late, Ending(1, 10.0, 0, finished=True)).first_failure().rank == 1
    assert "exit code 0 while others" in Ending(1, 10.0, 0).describe()


def test_a_worker_that_came_to_its_end_does_not_cause_an_unrelated_error():
    watch = watch_of(Ending(0, 40.0, 1, "OSError: disk full"), Ending(1, 10.0, 0, finished=True))
    assert watch.first_failure().rank == 0


def test_crash_after_the_end_is_no_failure():
    assert not watch_of(Ending(0, 1.0, 0, finished=True)).failed()


@pytest.mark.parametrize("consequence", [Ending(0, 40.0, 1, "RuntimeError: AllReduce timed out"), Ending(0, 40.0, -signal.SIGTERM, pid=6)])
def test_a_stopped_worker_is_the_cause_of_what_its_peers_die_of(consequence):
    watch = watch_of(consequence, ranks=range(2))
    watch.stopped, watch.pids = {1}, {0: 6, 1: 7}
    assert watch.first_failure().rank == 1 and watch.first_failure().pid == 7
    assert watch.first_failure().describe() == "was stopped (SIGSTOP) and did not answer"
    watch.endings[0] = Ending(0, 40.0, 1, "OSError: disk full")
    assert watch.first_failure().rank == 0


def test_stopped_processes_are_seen_and_those_that_go_on_again_too(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        write_record(tmp_path, "worker_0", {"rank": 0, "pid": process.pid, "state": "running", "time": 1.0})
        watch = Watch(tmp_path, [0], lambda pid: None)
        for number, expected in ((signal.SIGSTOP, {0}), (signal.SIGCONT, set())):
            process.send_signal(number)
            deadline = time.time() + 20
            while watch.stopped != expected and time.time() < deadline:
                watch.poll()
                time.sleep(0.01)
            assert watch.stopped == expected and not watch.failed()
    finally:
        process.kill()
        process.wait()


def test_who_did_not_answer():
    first = Ending(0, 10.0, 1, "RuntimeError: collective timed out")
    assert watch_of(first, Ending(1, 11.0, KILLED), ranks=range(3)).unanswered(first) == (1, 2)


def test_early_exit_needs_others_at_work_and_time():
    now = time.time()
    assert watch_of(Ending(0, now - 20, 0), ranks=range(2)).left_early(15)
    assert not watch_of(Ending(0, now - 5, 0), ranks=range(2)).left_early(15)
    assert not watch_of(Ending(0, now - 20, 0, finished=True), ranks=range(2)).left_early(15)
    assert not watch_of(Ending(0, now - 20, 0)).left_early(15)


def test_process_gone_without_a_record_of_its_end(tmp_path):
    write_record(tmp_path, "worker_0", {"rank": 0, "pid": 2**22 + 1, "state": "running", "time": 1.0})
    watch = Watch(tmp_path, [0, 1], {2**22 + 1: -11}.get)
    watch.poll()
    assert watch.endings[0].describe() == "was killed by signal 11 (SIGSEGV)"
    assert watch.running == (1,) and watch.failed() and not watch.all_gone


def test_living_process_with_a_record_of_its_end_is_not_gone(tmp_path):
    record = {"rank": 0, "pid": os.getpid(), "state": "finished", "code": 0, "time": 1.0}
    write_record(tmp_path, "worker_0", record)
    watch = Watch(tmp_path, [0], lambda pid: None)
    watch.poll()
    assert watch.running == () and not watch.all_gone and not watch.failed()


def test_msrun_log_names_exit_codes(tmp_path):
    log = tmp_path / "msrun.log"
    log.write_text("[ERROR] x Worker process 41 exit with exception. Error code: -9.\nother\n")
    assert msrun_exit_codes(log) == {41: -9}
    assert msrun_exit_codes(tmp_path / "none") == {}


def test_last_lines_are_the_errors_and_the_last_traceback_without_call_stacks(tmp_path):
    log = tmp_path / "worker_0.log"
    log.write_text(
        "step 1\nTraceback (most recent call last):\nold\nstep 2\n[ERROR] RingAllGather] sizes differ\n"
        "Traceback (most recent call last):\n  File x\nRuntimeError: \n-----\n- Kernel error:\n-----\ny\n\n-----\n"
        "- The Function Call Stack: (For framework developers)\n-----\nIn file z\n"
    )
    expected = ["Traceback (most recent call last):", "  File x", "RuntimeError:", "- Kernel error:", "y"]
    assert last_lines(log) == ["[ERROR] RingAllGather] sizes differ", *expected]


def test_last_lines_without_a_traceback_are_the_last_ones(tmp_path):
    log = tmp_path / "worker_0.log"
    log.write_text("".join(f"line {number}\n\n[WARNING] ME(1): waiting\n" for number in range(40)))
    assert last_lines(log, 2) == ["line 38", "line 39"]
    assert last_lines(tmp_path / "none") == []


@pytest.mark.parametrize(
    ("workers", "cores", "expected"),
    [
        (2, [0, 1], [[0], [1]]),
        (2, [1, 3, 5, 7, 9], [[1, 3], [5, 7]]),
        (3, [4, 6], [[4], [6], [4]]),
        (1, [2, 3], [[2, 3]]),
    ],
)
def test_core_sets(workers, cores, expected):
    assert core_sets(workers, cores) == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workers": 0}, "--workers = 0"),
        ({"workers": 2, "local_workers": 3}, "--local-worker-num = 3"),
        ({"workers": 3, "local_workers": 2, "master_port": 8118}, "a divisor of --worker-num = 3"),
        ({"workers": 4, "local_workers": 2, "master_port": 8118, "node_rank": 2}, "--node-rank = 2: 0 to 1"),
        ({"workers": 4, "local_workers": 2}, "--master-port: needed"),
        ({"workers": 2, "master_port": 80}, "--master-port = 80"),
    ],
)
def test_launch_options_are_checked(tmp_path, options, message):
    with pytest.raises(LaunchError, match=message):
        LaunchOptions(log_dir=tmp_path, **options)


def test_ranks_of_a_machine(tmp_path):
    options = LaunchOptions(8, tmp_path, local_workers=4, master_port=8118, node_rank=1)
    assert list(options.ranks) == [4, 5, 6, 7]


@pytest.mark.parametrize(
    ("log", "taken"),
    [
        ("bind: Address already in use", True),
        ("InitTCPServer] Failed to init the tcp server.", True),
        ("cannot resolve the address of the scheduler", False),
    ],
)
def test_scheduler_that_can_not_start_ends_the_attempt(tmp_path, log, taken):
    """Whatever it died of: the workers would wait for it. Only a port that was taken is worth another attempt."""
    run = _Run(["job.py"], LaunchOptions(2, tmp_path))
    (tmp_path / "status").mkdir()
    assert not run._scheduler_failed()
    write_record(tmp_path / "status", SCHEDULER, {"rank": 0, "pid": 1, "state": "failed", "time": time.time(), "error": "x", "code": 1})
    (tmp_path / "scheduler.log").write_text(f"[ERROR] {log}\n")
    assert run._scheduler_failed() and run._port_taken() is taken


@pytest.mark.parametrize(("stopped", "said"), [({1}, "worker 1 (pid 7) was stopped (SIGSTOP)"), (set(), "the scheduler lost a worker")])
def test_a_scheduler_that_misses_a_heartbeat_names_the_worker_that_is_stopped(tmp_path, capsys, stopped, said):
    run = _Run(["job.py"], LaunchOptions(2, tmp_path))
    (tmp_path / "status").mkdir()
    error = "RuntimeError: The total number of timed out node is 1."
    write_record(tmp_path / "status", SCHEDULER, {"rank": 0, "pid": 1, "state": "failed", "time": time.time(), "error": error, "code": 1})
    run.started, run.watch = time.time(), watch_of(ranks=range(2))
    run.watch.stopped, run.watch.pids = stopped, {0: 6, 1: 7}
    assert run._verdict(1) == 1 and said in capsys.readouterr().err
