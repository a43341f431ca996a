"""The launcher with two workers under msrun that all-reduce in a loop, and what can happen to one of them."""

import os
import signal
import socket
import time

import pytest
from drive import finish, left_behind, start

from kcp.launch_watch import read_record

JOB = """
import os, signal, sys, time
import numpy as np
import mindspore as ms
from mindspore.communication import get_rank, init

mode = sys.argv[1]
ms.set_device("CPU")
init()
all_reduce = ms.ops.AllReduce()
steps = 10 if mode == "fine" else 10_000
for step in range(steps):
    if get_rank() == 1 and step == 5:
        if mode == "raise":
            raise ValueError("worker one is out")
        if mode == "exit":
            sys.exit(0)
        if mode == "refuse":
            print("kcp: error: x = 1: no", file=sys.stderr)
            sys.exit(2)
        if mode == "stop":
            time.sleep(600)
    total = all_reduce(ms.Tensor(np.full(4, 1.0 + get_rank(), np.float32))).asnumpy()
    print(f"step {step} {total[0]} cores {sorted(os.sched_getaffinity(0))}", flush=True)
    time.sleep(0.02)
"""


@pytest.fixture
def job(tmp_path):
    script = tmp_path / "job.py"
    script.write_text(JOB)
    return script


def wait_for_step(tmp_path, rank, step):
    log = tmp_path / "logs" / f"worker_{rank}.log"
    deadline = time.time() + 120
    while time.time() < deadline:
        if log.exists() and f"step {step} " in log.read_text(errors="replace"):
            return read_record(tmp_path / "logs" / "status" / f"worker_{rank}.json")["pid"]
        time.sleep(0.05)
    raise AssertionError("the workers did not start")


def test_worker_killed_in_mid_run_is_named_and_nothing_is_left(tmp_path, job):
    launcher = start(job, tmp_path / "logs", "kill", workers=2)
    pid = wait_for_step(tmp_path, 1, 5)
    os.kill(pid, signal.SIGKILL)
    code, out, err = finish(launcher, timeout=60)
    assert code == 1
    assert f"kcp: error: worker 1 (pid {pid}) was killed by signal 9 (SIGKILL)" in err
    assert "step 5 3.0" in out and "Traceback" not in err
    assert left_behind(tmp_path) == []


@pytest.mark.ci
def test_workers_finish_pinned_to_cores_of_their_own(tmp_path, job):
    code, out, err = finish(start(job, tmp_path / "logs", "fine", workers=2))
    assert (code, err) == (0, "")
    assert [line.split()[:3] for line in out.splitlines()] == [["step", str(step), "3.0"] for step in range(10)]
    logs = [(tmp_path / "logs" / f"worker_{rank}.log").read_text() for rank in range(2)]
    cores = [log.partition("cores ")[2].splitlines()[0] for log in logs]
    assert cores[0] != cores[1] or len(os.sched_getaffinity(0)) == 1
    assert left_behind(tmp_path) == []


@pytest.mark.ci
def test_exception_in_one_worker(tmp_path, job):
    code, _, err = finish(start(job, tmp_path / "logs", "raise", workers=2))
    assert code == 1
    assert "worker 1" in err.splitlines()[0] and "failed: ValueError: worker one is out" in err.splitlines()[0]
    assert "| ValueError: worker one is out" in err
    assert left_behind(tmp_path) == []


@pytest.mark.ci
def test_worker_that_leaves_with_exit_code_zero(tmp_path, job):
    code, _, err = finish(start(job, tmp_path / "logs", "exit", workers=2))
    assert code == 1
    assert "worker 1" in err.splitlines()[0] and "left with exit code 0 while others were still at work" in err
    assert left_behind(tmp_path) == []


@pytest.mark.ci
def test_user_error_of_one_worker(tmp_path, job):
    assert finish(start(job, tmp_path / "logs", "refuse", workers=2))[::2] == (2, "kcp: error: x = 1: no\n")
    assert left_behind(tmp_path) == []


@pytest.mark.ci
def test_worker_that_does_not_answer(tmp_path, job):
    code, _, err = finish(start(job, tmp_path / "logs", "stop", workers=2))
    assert code == 1
    assert "worker 0" in err.splitlines()[0] and "worker 1 was still at work and did not answer" in err
    assert left_behind(tmp_path) == []


@pytest.mark.ci
def test_interrupt_stops_all_workers(tmp_path, job):
    launcher = start(job, tmp_path / "logs", "kill", workers=2)
    wait_for_step(tmp_path, 1, 5)
    launcher.send_signal(signal.SIGINT)
    code, _, err = finish(launcher, timeout=30)
    assert code == 130 and "interrupted" in err
    assert left_behind(tmp_path) == []


@pytest.mark.ci
def test_all_workers_die_with_a_killed_launcher(tmp_path, job):
    launcher = start(job, tmp_path / "logs", "kill", workers=2)
    wait_for_step(tmp_path, 1, 5)
    launcher.kill()
    launcher.wait(timeout=30)
    deadline = time.time() + 20
    while left_behind(tmp_path) and time.time() < deadline:
        time.sleep(0.1)
    assert left_behind(tmp_path) == []


def test_port_in_use_is_refused_at_once(tmp_path, job):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, _, err = finish(start(job, tmp_path / "logs", "fine", workers=2, port=port), timeout=30)
    assert code == 1 and err == f"kcp: error: --master-port = {port}: in use, choose another one or leave it out\n"


@pytest.mark.ci
def test_port_taken_between_choice_and_start_is_replaced(tmp_path, job, monkeypatch):
    from pathlib import Path

    from kcp import launch

    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        ports = [taken.getsockname()[1]]
        free = launch.free_port
        monkeypatch.setattr(launch, "free_port", lambda: ports.pop() if ports else free())
        options = launch.LaunchOptions(2, Path(tmp_path / "logs"))
        assert launch.launch([str(job), "fine"], options) == 0
    assert ports == []
