"""The memory of a run: estimated within the factor that is documented, and refused before anything starts where it is not there."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from _msrun import REPO
from _runs import WORKER, write_config

from kcp import cli, memory
from kcp.config import load_run_config

MORE = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "linear_num_heads": 4, "linear_head_dim": 64}

# The system counts the memory of whoever starts a process to its peak, so a small one starts it and reads the figure.
PEAK = """
import resource, subprocess, sys
code = subprocess.call([sys.executable, *sys.argv[1:]])
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
sys.exit(code)
"""


def configure(folder: Path, callbacks=(), batch_size=2, **model) -> Path:
    path = write_config(folder, batch_size=batch_size)
    run = yaml.safe_load(path.read_text())
    run["model"]["model_config"] |= model
    run["callbacks"] = list(callbacks)
    path.write_text(yaml.safe_dump(run))
    return path


@pytest.mark.ci
def test_the_estimate_is_within_its_factor_of_a_real_run(tmp_path):
    """The largest resident set of a worker of two steps, whatever the process that starts it has grown to."""
    path = configure(tmp_path, **MORE | {"num_hidden_layers": 1}, vocab_size=8000, seq_length=4096)
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MS_")}
    environment["PYTHONPATH"] = os.pathsep.join([str(REPO), str(REPO / "tests")])
    command = [sys.executable, "-c", PEAK, str(WORKER), str(path), "--steps", "2", "--mode", "graph"]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=240)
    assert done.returncode == 0, done.stdout[-2000:]
    peak, estimate = int(done.stdout.split()[-1]) << 10, memory.estimate_memory(load_run_config(path))
    assert estimate.total - estimate.process > estimate.process, "the run must be about more than the process itself"
    assert peak / memory.FACTOR <= estimate.total <= peak * memory.FACTOR, (peak, estimate)


def test_the_estimate_grows_with_what_it_is_of(tmp_path, monkeypatch):
    run = load_run_config(configure(tmp_path, **MORE, seq_length=4096))

    def parts(**changes):
        model = {key: value for key, value in changes.items() if hasattr(run.model, key)}
        training = {key: value for key, value in changes.items() if hasattr(run.training, key)}
        parallel = {key: value for key, value in changes.items() if hasattr(run.parallel, key)}
        changed = replace(run, model=replace(run.model, **model), training=replace(run.training, **training))
        return memory.estimate_memory(replace(changed, parallel=replace(run.parallel, **parallel)))

    base = parts()
    assert parts(batch_size=4).activations == 2 * base.activations and parts(batch_size=4).logits == 2 * base.logits
    assert parts(context_parallel=2).activations == base.activations // 2
    assert parts(vocab_size=2 * 259).logits == 2 * base.logits
    monkeypatch.setenv("KCP_BACKEND", "composite")
    composite = parts()
    assert composite == replace(base, logits=memory.COMPOSITE_LOGITS * 4 * 2 * 4096 * 259)
    monkeypatch.undo()
    projections = 4 * 128 * 256 + 4 * 128 + 2 * (64 * 128 + 256 * 64)
    layer = 2 * 128 + projections + 3 * 256 * 4 + 4 + 256 + 64 + 3 * 128 * 256
    assert base.parameters == 17 * 4 * (2 * 259 * 128 + 128 + 2 * layer)
    assert parts(recompute=True) == base, "a graph's peak was not lower with it"
    assert parts(recompute=True, mode=1).activations < 0.8 * parts(mode=1).activations
    assert parts(mode=1).total < base.total
    assert parts(kda_disable_recompute=False).activations < base.activations
    latent = {"layer_types": ("full_attention",) * 2, "num_attention_heads": 4, "kv_lora_rank": 64}
    assert parts(**latent).activations != base.activations
    experts = {"mlp_layer_types": ("sparse",) * 2, "num_experts": 8, "num_experts_per_token": 2, "moe_intermediate_size": 256}
    assert parts(**experts).activations > base.activations and parts(**experts).parameters > 2 * base.parameters


@pytest.fixture
def launched(monkeypatch):
    """What was started in place of workers."""
    import kcp.launch_restart

    calls = []
    monkeypatch.setattr(kcp.launch_restart, "launch_with_restarts", lambda *given: calls.append(given) or 0)
    return calls


def limited(gib, **more):
    return [{"type": "KcpMemory", "available_gib": gib, **more}]


def test_a_run_that_does_not_fit_is_refused_with_both_figures_and_what_would(tmp_path, launched, capsys):
    path = configure(tmp_path, limited(4.0), batch_size=16, **MORE, seq_length=4096)
    assert cli.main(["train", str(path), "--output-dir", str(tmp_path / "out")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    run = load_run_config(path)
    needed = memory.estimate_memory(run).total / memory.GIB
    assert line.startswith(f"kcp: error: memory: {needed:.1f} GiB are needed for 1 worker (each {needed:.1f}: process 0.8, ")
    assert "4.0 GiB are available" in line and "{type: KcpMemory, check: False} under callbacks" in line
    fits = memory.largest_batch(run, 1, 4 * memory.GIB)
    assert f"runner_config.batch_size = {fits} fits" in line and 1 <= fits < 16
    assert memory.estimate_memory(run, fits).total <= 4 * memory.GIB < memory.estimate_memory(run, fits + 1).total
    assert not launched and not (tmp_path / "out").exists()


def test_what_fits_is_started_and_the_check_can_be_switched_off(tmp_path, launched, capsys):
    fitting = configure(tmp_path, limited(4.0), batch_size=2, **MORE, seq_length=4096)
    assert cli.main(["train", str(fitting), "--output-dir", str(tmp_path / "out")]) == 0
    switched = configure(tmp_path, limited(4.0, check=False), batch_size=16, **MORE, seq_length=4096)
    assert cli.main(["train", str(switched), "--output-dir", str(tmp_path / "out")]) == 0
    assert len(launched) == 2


@pytest.mark.parametrize(
    ("gib", "advice"),
    [
        (1.4, "batch_size = 1 fits with context.mode: 1 and recompute_config.recompute: True"),
        (0.5, "lower model.model_config.seq_length or the model's sizes"),
    ],
)
def test_what_else_could_be_changed(tmp_path, gib, advice):
    run = load_run_config(configure(tmp_path, batch_size=1, **MORE | {"num_hidden_layers": 8}, seq_length=4096))
    assert advice in memory.memory_problem(run, 1, int(gib * memory.GIB))


def test_workers_of_this_machine_count_together_and_npus_are_not_judged(tmp_path):
    run = load_run_config(configure(tmp_path))
    total = memory.estimate_memory(run).total
    assert memory.memory_problem(run, 2, 2 * total) is None
    assert "are needed for 3 workers (each" in memory.memory_problem(run, 3, 2 * total)
    assert memory.memory_problem(run, 3, None) is None
    assert memory.memory_problem(replace(run, training=replace(run.training, device_target="Ascend")), 3, 1) is None


def test_what_is_available_is_what_the_system_says():
    psutil = pytest.importorskip("psutil")
    assert 0 < memory.available_bytes() <= psutil.virtual_memory().total


def test_plan_shows_the_memory_and_whether_it_is_there(tmp_path, capsys):
    assert cli.main(["plan", str(configure(tmp_path, limited(0.5)))]) == 0
    text = capsys.readouterr().out
    assert "memory of a worker at a step's peak, GiB: 0.8" in text and "within a factor of 2" in text
    assert "this machine alone can't run it: memory: 0.8 GiB are needed for 1 worker" in text and "0.5 GiB are available" in text
