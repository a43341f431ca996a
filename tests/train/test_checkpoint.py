"""Checkpoint folders: what is written, what is kept, and that a damaged one is refused by name before anything is used."""

import errno
import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from _msrun import REPO
from hf_cases import TINY, random_tensors

from kcp.checkpoint import (
    FILES,
    MODEL,
    OPTIMIZER,
    STATE,
    checkpoints_in,
    find_checkpoint,
    read_checkpoint,
    remove_left_overs,
    set_aside,
    write_checkpoint,
)
from kcp.hf.errors import CheckpointError

WEIGHTS = {"a.weight": np.arange(12, dtype=np.float32).reshape(3, 4), "b": np.float32([1.5, -0.0, np.nan])}
MOMENTS = {"adam_m.b": np.zeros(3, np.float32), "global_step": np.int32([7])}
WANTED = {"a.weight": ("float32", (3, 4)), "b": ("float32", (3,)), "adam_m.b": ("float32", (3,)), "global_step": ("int32", (1,))}


def state(step):
    return {"step": step, "samples": 2 * step, "data": {}, "random": {}, "counters": {"skipped": 1}, "run": {}}


def write(folder, step=7, weights=WEIGHTS, keep_last=0):
    return write_checkpoint(folder, weights, MOMENTS, state(step), {"hidden_size": 4}, keep_last)


def refusal(folder):
    with pytest.raises(CheckpointError) as caught:
        read_checkpoint(folder)
    return caught.value.problems


def test_what_is_written_is_read_bit_for_bit(tmp_path):
    checkpoint = read_checkpoint(write(tmp_path))
    assert (checkpoint.step, checkpoint.state["samples"], checkpoint.state["counters"]) == (7, 14, {"skipped": 1})
    checkpoint.check(WANTED)
    read = dict(checkpoint.read())
    assert read.keys() == WANTED.keys()
    for name, value in {**WEIGHTS, **MOMENTS}.items():
        assert read[name].tobytes() == value.tobytes() and read[name].dtype == value.dtype
    assert sorted(path.name for path in checkpoint.folder.iterdir()) == sorted((*FILES, STATE))


def test_the_newest_stay_and_the_newest_is_found(tmp_path):
    for step in (5, 10, 15, 20):
        write(tmp_path / "checkpoints", step, keep_last=2)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step_00000015", "step_00000020"]
    newest = tmp_path / "checkpoints" / "step_00000020"
    assert find_checkpoint(tmp_path) == find_checkpoint(tmp_path / "checkpoints") == find_checkpoint(newest) == newest
    with pytest.raises(CheckpointError, match="no checkpoint to resume from"):
        find_checkpoint(tmp_path / "elsewhere")


def test_a_step_that_is_written_again_replaces_its_checkpoint(tmp_path):
    write(tmp_path, weights={"b": np.zeros(1, np.float32)})
    assert dict(read_checkpoint(write(tmp_path)).read()).keys() == WANTED.keys()
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000007"]


@pytest.mark.parametrize("name", [*FILES, STATE])
def test_every_flipped_bit_is_noticed(tmp_path, name):
    path = write(tmp_path) / name
    content = path.read_bytes()
    for position in {0, 8, len(content) // 3, len(content) // 2, len(content) - 2}:
        path.write_bytes(content[:position] + bytes([content[position] ^ 0x10]) + content[position + 1 :])
        assert any(str(path) in line for line in refusal(path.parent)), position
    path.write_bytes(content)
    read_checkpoint(path.parent)


@pytest.mark.parametrize("name", [*FILES, STATE])
@pytest.mark.parametrize("size", [0, 1, -1])
def test_truncated_and_missing_files_are_named(tmp_path, name, size):
    path = write(tmp_path) / name
    path.write_bytes(path.read_bytes()[: size - (size == -1 and name == STATE)])
    assert any(str(path) in line for line in refusal(path.parent))
    path.unlink()
    assert any(str(path) in line and "No such file" in line for line in refusal(path.parent))


def test_another_checkpoint_is_offered_in_place_of_a_broken_one(tmp_path):
    write(tmp_path, 5)
    broken = write(tmp_path, 10)
    (broken / MODEL).unlink()
    assert refusal(broken)[-1] == f"{tmp_path}: other checkpoints to resume from: step_00000005"


def test_files_of_other_folders_are_not_read(tmp_path):
    """Neither through a link nor through a name in the state file: it names exactly the files of a checkpoint."""
    folder = write(tmp_path)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes((folder / OPTIMIZER).read_bytes())
    (folder / OPTIMIZER).unlink()
    (folder / OPTIMIZER).symlink_to(elsewhere)
    assert any("a link, a file of this folder is needed" in line for line in refusal(folder))
    (folder / STATE).rename(tmp_path / "state")
    (folder / STATE).symlink_to(tmp_path / "state")
    assert refusal(folder) == (f"{folder / STATE}: a link, a file of this folder is needed",)
    (tmp_path / "state").replace(folder / STATE)
    from kcp.checkpoint import _sealed

    content = json.loads((folder / STATE).read_text())
    content.pop("sha256")
    content["files"]["../elsewhere"] = content["files"].pop(OPTIMIZER)
    (folder / STATE).write_text(json.dumps(_sealed(content)))
    assert any("format" in line for line in refusal(folder))


def test_a_state_of_another_format_is_refused(tmp_path):
    folder = write(tmp_path)
    (folder / STATE).write_text(json.dumps({"format": 99}))
    assert "checksum" in refusal(folder)[0]
    (folder / STATE).write_text("[" * 100_000)
    assert "not JSON" in refusal(folder)[0]


def test_tensors_of_another_run_are_listed_by_name(tmp_path):
    wanted = WANTED | {"a.weight": ("float32", (4, 3)), "b": ("bfloat16", (3,)), "adam_v.b": ("float32", (3,))}
    del wanted["global_step"]
    with pytest.raises(CheckpointError) as caught:
        read_checkpoint(write(tmp_path)).check(wanted)
    assert [line.split(":")[0] for line in caught.value.problems] == ["a.weight", "b", "adam_v.b", "global_step"]
    assert "has shape [3, 4]" in caught.value.problems[0] and "[4, 3] is needed" in caught.value.problems[0]
    assert "is float32" in caught.value.problems[1] and "bfloat16 is needed" in caught.value.problems[1]


def test_left_overs_of_interrupted_writes(tmp_path):
    write(tmp_path, 5)
    for name in (".step_00000010.new", ".step_00000005.old"):
        (tmp_path / name).mkdir()
    write(tmp_path, 4).rename(tmp_path / ".step_00000004.old")
    remove_left_overs(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000004", "step_00000005"]


def test_checkpoints_of_another_course_are_set_aside(tmp_path):
    folder = tmp_path / "checkpoints"
    for step in (5, 10, 15):
        write(folder, step)
    assert set_aside(folder, 15) is None
    assert set_aside(folder, 5) == tmp_path / "checkpoints.old-1"
    assert [path.name for path in checkpoints_in(folder)] == ["step_00000005"]
    assert [path.name for path in checkpoints_in(tmp_path / "checkpoints.old-1")] == ["step_00000010", "step_00000015"]
    write(folder, 10)
    assert set_aside(folder, 0) == tmp_path / "checkpoints.old-2"


def test_a_full_disk_leaves_the_earlier_checkpoint_and_nothing_half(tmp_path):
    write(tmp_path, 5)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
        with pytest.raises(CheckpointError, match="step_00000010: the checkpoint can't be written"):
            write(tmp_path, 10, {"a.weight": np.zeros(100_000, np.float32)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000005"]
    read_checkpoint(tmp_path / "step_00000005")


@pytest.mark.parametrize("existing", [False, True])
@pytest.mark.parametrize("call", range(15))
def test_space_that_ends_at_any_moment_leaves_the_earlier_checkpoints(tmp_path, monkeypatch, call, existing):
    """The system refuses one write after the other; also where the step has a checkpoint, which the new one was to replace."""
    import kcp.checkpoint as module

    write(tmp_path, 5)
    if existing:
        write(tmp_path, 10)
    before = {path: path.read_bytes() for path in sorted(tmp_path.rglob("*")) if path.is_file()}
    calls = [0]

    def failing(function):
        def wrapped(*arguments, **options):
            calls[0] += 1
            if calls[0] == call + 1:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return function(*arguments, **options)

        return wrapped

    with monkeypatch.context() as patch:
        patch.setattr(module, "save_file", failing(module.save_file))
        patch.setattr(module, "_flush", failing(module._flush))
        for name in ("mkdir", "write_text", "rename"):
            patch.setattr(Path, name, failing(getattr(Path, name)))
        try:
            folder = write(tmp_path, 10)
        except CheckpointError as error:
            (line,) = error.problems
            assert line.startswith(f"{tmp_path / 'step_00000010'}: the checkpoint can't be written: ")
            assert "No space left on device, " in line and line.endswith(" bytes are free")
        else:
            assert calls[0] <= call, "an error of the system was lost"
            assert folder.name == "step_00000010" and calls[0] >= 12
    for path in checkpoints_in(tmp_path):
        read_checkpoint(path)
    if calls[0] > call and existing is False and not (tmp_path / "step_00000010").exists():
        assert {path: path.read_bytes() for path in sorted(tmp_path.rglob("*")) if path.is_file()} == before
    assert {"step_00000005"} | ({"step_00000010"} if existing else set()) <= {path.name for path in checkpoints_in(tmp_path)}


def test_too_little_space_is_seen_before_anything_is_written(tmp_path, monkeypatch):
    import kcp.checkpoint as module

    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 10})())
    monkeypatch.setattr(module, "save_file", None)
    with pytest.raises(CheckpointError, match="76 bytes in all: No space left on device, 10 bytes are free"):
        write(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_file_system_that_is_full(tmp_path):
    """A real one, of 256 KiB, where this process may mount it: the error names the file, and the earlier checkpoint stays."""
    script = f"mount -t tmpfs -o size=256k tmpfs {tmp_path} && exec {sys.executable} -c '{FILLER}' {tmp_path}"
    if subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode:
        pytest.skip("no mount of its own")
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    done = subprocess.run(["unshare", "-m", "sh", "-c", script], capture_output=True, text=True, env=environment, timeout=60)
    assert done.returncode == 0, done.stderr
    first, second, names = done.stdout.splitlines()
    assert first.endswith("bytes are free") and "model.safetensors, " in first and "No space left on device" in first
    assert "400004 bytes in all: No space left on device, " in second
    assert names == "['fill', 'step_00000001']"


FILLER = """
import sys
import numpy as np
from pathlib import Path
import kcp.checkpoint as c
folder = Path(sys.argv[1])
state = {"samples": 1, "data": {}, "random": {}, "counters": {}, "run": {}}
def write(step, size):
    try:
        c.write_checkpoint(folder, {"w": np.zeros(size, np.float32)}, {"n": np.int32([1])}, {"step": step, **state}, {}, 0)
    except c.CheckpointError as error:
        print(error)
write(1, 10_000)
free = c.shutil.disk_usage(folder).free
(folder / "fill").write_bytes(bytes(free - 60_000))
write(2, 14_330)
write(3, 100_000)
c.read_checkpoint(folder / "step_00000001")
print(sorted(path.name for path in folder.iterdir()))
"""


def test_a_place_that_is_no_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="can't be written"):
        write(tmp_path / "file")


WRITER = """
import sys
import numpy as np
from pathlib import Path
from kcp.checkpoint import write_checkpoint
weights = {f"w{n}": np.full(200_000, n, np.float32) for n in range(8)}
for step in range(1, 10_000):
    state = {"step": step, "samples": step, "data": {}, "random": {}, "counters": {}, "run": {}}
    write_checkpoint(Path(sys.argv[1]), weights, {"global_step": np.int32([step])}, state, {}, 2)
"""


def test_killed_at_any_moment_what_has_its_final_name_is_whole(tmp_path):
    """SIGKILL, eight times at growing delays; every folder of the final name passes every check."""
    seen = set()
    for attempt in range(8):
        folder = tmp_path / str(attempt)
        process = subprocess.Popen([sys.executable, "-c", WRITER, str(folder)], env={**os.environ, "PYTHONPATH": str(REPO)})
        deadline = time.time() + 30
        while time.time() < deadline and not checkpoints_in(folder):
            time.sleep(0.002)
        time.sleep(0.009 * attempt)
        process.kill()
        process.wait()
        left = [path for path in folder.iterdir() if path.name.startswith(".")]
        seen.update(path.name.rpartition(".")[2] for path in left)
        assert checkpoints_in(folder)
        for path in checkpoints_in(folder):
            assert int(read_checkpoint(path).step) == int(path.name[5:])
        remove_left_overs(folder)
        assert not [path for path in folder.iterdir() if path.name.startswith(".")]
    assert seen, "no write was interrupted: the test shows nothing"


def test_a_checkpoint_is_a_source_of_weights_and_of_a_conversion(tmp_path):
    from kcp.hf import kcp_to_hf
    from kcp.hf.tensors import scan

    weights = {name: np.frombuffer(raw, np.float32).reshape(shape) for name, (_, shape, raw) in random_tensors().items()}
    folder = write_checkpoint(tmp_path, weights, MOMENTS, state(7), TINY, 0)
    assert scan(folder).keys() == weights.keys()
    kcp_to_hf(folder, tmp_path / "hf")
    back = scan(tmp_path / "hf")
    assert all(np.array_equal(back[name].read(), value) for name, value in weights.items())
    assert Path(tmp_path / "hf" / "config.json").is_file()
