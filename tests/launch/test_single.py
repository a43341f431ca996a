"""The launcher with one worker: what the user reads, which exit code, and that nothing is left."""

import os
import signal
import time

import pytest
from drive import finish, left_behind, start

from kcp.launch_watch import read_record


def write(tmp_path, text):
    script = tmp_path / "job.py"
    script.write_text("import os, signal, sys, time\n" + text)
    return script


def run(tmp_path, text):
    result = finish(start(write(tmp_path, text), tmp_path / "logs"), timeout=60)
    assert left_behind(tmp_path) == []
    return result


def wait_for_worker(tmp_path):
    deadline = time.time() + 30
    while time.time() < deadline:
        record = read_record(tmp_path / "logs" / "status" / "worker_0.json")
        if record and (tmp_path / "ready").exists():
            return record["pid"]
        time.sleep(0.05)
    raise AssertionError("the worker did not start")


SLEEPER = "open(os.path.join(os.path.dirname(__file__), 'ready'), 'w').close()\ntime.sleep(600)\n"


def test_progress_is_relayed_and_the_rest_kept_in_the_log(tmp_path):
    code, out, err = run(tmp_path, "print('step 1'); print('noise'); print('kcp: done'); print('stepping stone')")
    assert (code, out, err) == (0, "step 1\nkcp: done\n", "")
    assert "noise" in (tmp_path / "logs" / "worker_0.log").read_text()


def test_exception_is_named_with_its_traceback(tmp_path):
    code, _, err = run(tmp_path, "def inner():\n    raise ValueError('too big:\\n 7')\ninner()")
    lines = err.splitlines()
    assert code == 1
    assert lines[0].startswith("kcp: error: worker 0 (pid ") and "failed: ValueError: too big: (" in lines[0]
    assert "job.py, line 3)" in lines[0]
    assert lines[-1] == "  |  7" and any("in inner" in line for line in lines)


def test_error_in_a_datasets_own_code_is_named(tmp_path):
    head = "Exception thrown from user defined Python function in dataset."
    lines = [head, "---", "- Python Call Stack:", "---", "Traceback:", "  x", "ValueError: bad row"]
    code, _, err = run(tmp_path, f"raise RuntimeError(chr(10).join({lines}))")
    assert code == 1 and "failed: while reading data: ValueError: bad row (" in err.splitlines()[0]


def test_exit_code_is_named(tmp_path):
    code, _, err = run(tmp_path, "print('last words'); sys.exit(3)")
    assert code == 1
    assert "left with exit code 3" in err and "| last words" in err


def test_message_of_sys_exit_is_shown(tmp_path):
    code, _, err = run(tmp_path, "sys.exit('no way')")
    assert code == 1 and "left with exit code 1" in err and "| no way" in err


def test_user_errors_are_passed_on_alone(tmp_path):
    code, out, err = run(tmp_path, "print('kcp: error: a = 1: no', file=sys.stderr); print('kcp: error: b = 2: no'); sys.exit(2)")
    assert (code, out, err) == (2, "", "kcp: error: a = 1: no\nkcp: error: b = 2: no\n")


def test_exit_zero_alone_is_success(tmp_path):
    assert run(tmp_path, "sys.exit(0)")[0] == 0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGABRT])
def test_signal_is_named(tmp_path, number):
    code, _, err = run(tmp_path, f"print('so far'); sys.stdout.flush(); os.kill(os.getpid(), {int(number)})")
    assert code == 1
    assert f"was killed by signal {int(number)} ({number.name})" in err and "| so far" in err
    assert ("memory runs out" in err) == (number == signal.SIGKILL)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_stops_everything(tmp_path, number):
    launcher = start(write(tmp_path, "import subprocess\nsubprocess.Popen(['sleep', '613'])\n" + SLEEPER), tmp_path / "logs")
    wait_for_worker(tmp_path)
    launcher.send_signal(number)
    code, _, err = finish(launcher, timeout=30)
    assert code == 130 and "interrupted" in err and "Traceback" not in err
    assert left_behind(tmp_path) == [] and left_behind("sleep 613") == []


def test_worker_that_ignores_sigterm_is_killed(tmp_path):
    launcher = start(write(tmp_path, "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + SLEEPER), tmp_path / "logs")
    wait_for_worker(tmp_path)
    launcher.send_signal(signal.SIGINT)
    assert finish(launcher, timeout=30)[0] == 130
    assert left_behind(tmp_path) == []


def test_worker_dies_with_a_killed_launcher(tmp_path):
    launcher = start(write(tmp_path, SLEEPER), tmp_path / "logs")
    pid = wait_for_worker(tmp_path)
    launcher.kill()
    launcher.wait(timeout=30)
    deadline = time.time() + 20
    while os.path.exists(f"/proc/{pid}") and time.time() < deadline:
        time.sleep(0.05)
    assert left_behind(tmp_path) == []


def test_old_logs_are_replaced(tmp_path):
    run(tmp_path, "print('old')")
    (tmp_path / "logs" / "worker_7.log").write_text("older")
    run(tmp_path, "print('new')")
    assert (tmp_path / "logs" / "worker_0.log").read_text() == "new\n"
    assert not (tmp_path / "logs" / "worker_7.log").exists()


def test_log_folder_that_can_not_be_written(tmp_path):
    (tmp_path / "logs").write_text("a file")
    code, _, err = run(tmp_path, "pass")
    assert code == 1 and err.startswith("kcp: error: log folder ") and "Traceback" not in err
