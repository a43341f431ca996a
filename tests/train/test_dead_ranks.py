"""One rank dies, stops or leaves in the middle of training: the launcher ends the run, names that rank, and a resume works."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from _msrun import REPO
from _runs import begin, finish, prepare, read_metrics

from kcp.checkpoint import checkpoints_in, read_checkpoint

WORKER = Path(__file__).with_name("_dying_worker.py")
DRIVER = """
import sys
from pathlib import Path
from kcp.launch import LaunchOptions, launch
workers, log_dir, *target = sys.argv[1:]
sys.exit(launch(target, LaunchOptions(int(workers), Path(log_dir))))
"""
STEPS = 12
SAID = {
    "forward": "was killed by signal 9 (SIGKILL)",
    "backward": "was killed by signal 9 (SIGKILL)",
    "checkpoint": "was killed by signal 9 (SIGKILL)",
    "leave": "left with exit code 0 while others were still at work",
    "data": "sample 7: the text is broken",
    "stop": "",
}


def run_until_fault(folder: Path, fault: str, ranks: int, rank: int, limit: int) -> tuple[Path, str]:
    """``(run file, what the launcher said)`` of a run that must end with code 1 at most ``limit`` seconds after its fault."""
    path = prepare(folder, cp=ranks, callbacks=[{"type": "KcpCheckpoint", "save_steps": 4, "keep_last": 3}])
    mark = folder / "mark"
    arguments = [fault, str(rank), "7", str(mark), str(path), "--steps", str(STEPS), "--mode", "pynative"]
    command = [sys.executable, "-c", DRIVER, str(ranks), str(folder / "out" / "logs"), str(WORKER), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    process = subprocess.Popen(command, env=environment, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while process.poll() is None and not mark.exists():
        time.sleep(0.05)
    return path, finish(process, code=1, timeout=limit)


def left_behind(folder: Path) -> list[str]:
    """Command lines of processes that mention the run's folder."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if str(folder) in line:
                found.append(line)
    return found


FAULTS = [
    pytest.param("checkpoint", 2, 0, marks=pytest.mark.ci),
    pytest.param("leave", 2, 1, marks=pytest.mark.ci),
    *(pytest.param(fault, 2, 1, marks=pytest.mark.once) for fault in ("forward", "backward", "data", "stop")),
    *(pytest.param(fault, 4, 2, marks=pytest.mark.once) for fault in ("forward", "backward", "leave", "stop")),
]


@pytest.mark.parametrize(("fault", "ranks", "rank"), FAULTS)
def test_a_rank_that_dies_ends_the_run_and_a_resume_goes_on(tmp_path, fault, ranks, rank):
    path, said = run_until_fault(tmp_path, fault, ranks, rank, 60 if ranks == 2 else 90)
    first = said.splitlines()[0]
    assert SAID[fault] in first, said
    if fault == "stop":
        # A stopped rank says nothing; the peer that waited for it does, and the launcher adds who did not answer.
        assert f"worker {rank} was still at work and did not answer" in said
    else:
        assert f"worker {rank} (pid" in first, said
    assert left_behind(tmp_path) == []
    written = checkpoints_in(tmp_path / "out" / "checkpoints")
    assert [read_checkpoint(folder).step for folder in written] == [4]
    finish(begin(path, STEPS, "--mode", "pynative", "--resume"))
    assert [record["step"] for record in read_metrics(tmp_path)] == list(range(1, STEPS + 1))
    kept = sorted(entry.name for entry in (tmp_path / "out" / "checkpoints").iterdir())
    assert kept == [f"step_{step:08d}" for step in (4, 8, 12)]
