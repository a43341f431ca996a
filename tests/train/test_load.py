"""A long run of a tiny model on two ranks: no worker grows, neither in memory nor in threads nor in open files."""

import json
import time
from pathlib import Path

import psutil
import pytest
import yaml
from _msrun import REPO
from _runs import begin, finish, prepare

SETTLED = 100  # steps after which a worker must be as large as it will get
GROWTH = 0.02


def size_of(process: psutil.Process) -> dict[str, int]:
    """Resident bytes, threads and open files (sockets and pipes included) of a worker."""
    return {"memory": process.memory_info().rss, "threads": process.num_threads(), "files": process.num_fds()}


def watch(folder: Path, process, steps: int) -> list[list[tuple[int, dict]]]:
    """``(step, size)`` of both workers, every few steps of a run, to its last step but one at most."""
    metrics, samples, workers = folder / "metrics.jsonl", [[], []], []
    while process.poll() is None:
        time.sleep(0.05)
        done = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
        if done == 0 or (samples[0] and done - samples[0][-1][0] < 5):
            continue
        if not workers:
            records = [json.loads(next(folder.rglob(f"status/worker_{rank}.json")).read_text()) for rank in range(2)]
            workers = [psutil.Process(record["pid"]) for record in records]
        if done < steps:
            try:
                sizes = [size_of(worker) for worker in workers]
            except psutil.Error:
                break
            for rank, size in enumerate(sizes):
                samples[rank].append((done, size))
    return samples


def quickstart(folder: Path) -> Path:
    """The run of ``scripts/quickstart.sh``, its results in ``folder``."""
    run = yaml.safe_load((REPO / "configs" / "tiny_cp2.yaml").read_text())
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(run | {"output_dir": str(folder / "out")}))
    return path


@pytest.mark.parametrize(
    ("configure", "steps"),
    [
        pytest.param(lambda folder: prepare(folder, cp=2), 300, marks=pytest.mark.ci, id="small"),
        pytest.param(quickstart, 2000, marks=pytest.mark.once, id="quickstart"),
    ],
)
def test_workers_do_not_grow(tmp_path, configure, steps):
    with (tmp_path / "said.txt").open("w") as said:  # a pipe that nobody reads would stop the launcher
        process = begin(configure(tmp_path), steps, output=said)
        samples = watch(tmp_path / "out", process, steps)
        finish(process)
    for rank, found in enumerate(samples):
        settled = [size for step, size in found if SETTLED <= step <= SETTLED + 30]
        last = [size for step, size in found if step >= steps - 60]
        assert settled and last, found
        for what, allowed in (("memory", 1 + GROWTH), ("threads", 1), ("files", 1)):
            before, after = (max(size[what] for size in sizes) for sizes in (settled, last))
            print(f"worker {rank}: {what} {before} at step {SETTLED}, {after} at the end")
            assert after <= before * allowed, (what, rank, [(step, size[what]) for step, size in found])
