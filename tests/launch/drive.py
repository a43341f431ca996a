"""Runs kcp's launcher in a process of its own and looks at what it leaves behind."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
DRIVER = """
import sys
from pathlib import Path
from kcp.launch import LaunchError, LaunchOptions, launch
workers, port, log_dir, *target = sys.argv[1:]
try:
    options = LaunchOptions(int(workers), Path(log_dir), master_port=int(port) or None)
    sys.exit(launch(target, options))
except LaunchError as error:
    sys.exit(f"kcp: error: {error}")
"""


def start(script, log_dir, *arguments, workers=1, port=0):
    """Start the launcher on a script; its output is captured."""
    command = [sys.executable, "-c", DRIVER, str(workers), str(port), str(log_dir), str(script), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def finish(process, timeout=120):
    """Exit code, stdout and stderr of a launcher; it is killed when it does not end in time."""
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return process.returncode, out, err


def left_behind(word):
    """Command lines of processes that mention ``word``, this one and its parents aside."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) not in (os.getpid(), os.getppid()):
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if str(word) in line:
                found.append(line)
    return found
