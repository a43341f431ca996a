"""Small training runs for the tests: a configuration file, the workers, what they leave behind."""

import json
import os
import subprocess
import sys
from pathlib import Path

import yaml
from _msrun import REPO, WorkerError, run_workers, tail

WORKER = Path(__file__).with_name("_worker.py")

CONFIG = """
seed: 42
output_dir: '{output_dir}'
run_mode: train
use_parallel: {use_parallel}
use_legacy: False
load_checkpoint: ''
load_ckpt_format: safetensors
trainer: {{type: CausalLanguageModelingTrainer, model_name: kimi_linear}}
runner_config: {{epochs: 1, batch_size: {batch_size}, sink_mode: False}}
optimizer: {{type: AdamW, betas: [0.9, 0.95], eps: 1.0e-8, weight_decay: 0.1}}
lr_schedule: {{type: ConstantWarmUpLR, learning_rate: {learning_rate}, warmup_steps: 4, total_steps: -1}}
train_dataset: &train_dataset
  data_loader: {{type: SyntheticTokens, num_samples: 40}}
  input_columns: [input_ids, labels, loss_mask, cu_seqlens]
  construct_args_key: [input_ids, labels, loss_mask, cu_seqlens]
  num_parallel_workers: 1
  drop_remainder: True
train_dataset_task: {{type: CausalLanguageModelDataset, dataset_config: *train_dataset}}
context: {{mode: 0, device_target: CPU, max_device_memory: 4GB, jit_config: {{jit_level: O0}}}}
parallel_config: {{data_parallel: {dp}, context_parallel: {cp}}}
parallel: {{parallel_mode: 0}}
recompute_config: {{recompute: False}}
model:
  model_config:
    model_type: kimi_linear
    architectures: [KimiLinearForCausalLM]
    vocab_size: 259
    hidden_size: 32
    intermediate_size: 64
    num_hidden_layers: {layers}
    linear_num_heads: 2
    linear_head_dim: 16
    seq_length: 80
    kda_chunk_size: 16
    kda_cp_strategy: {strategy}
    tie_word_embeddings: {tied}
callbacks: []
runner_wrapper: {{type: KcpTrainOneStepCell, max_grad_norm: 1.0, max_skipped_steps: 3}}
"""


def write_config(folder: Path, *, dp=1, cp=1, strategy="none", tied=False, learning_rate=3.0e-3, batch_size=2, layers=1) -> Path:
    """Write a configuration of ``dp * cp`` workers; the global batch is ``batch_size * dp`` samples."""
    text = CONFIG.format(
        output_dir=folder / "out",
        use_parallel=dp * cp > 1,
        dp=dp,
        cp=cp,
        strategy=strategy,
        tied=tied,
        learning_rate=f"{learning_rate:.4e}",
        batch_size=batch_size,
        layers=layers,
    )
    path = folder / "config.yaml"
    path.write_text(text)
    return path


def start(workers: int, arguments: list[str], folder: Path, timeout: float = 240) -> list[str]:
    """Run the training worker in one plain process or in several under msrun; returns what each printed.

    Raises:
        WorkerError: It failed, or took longer than ``timeout`` seconds.
    """
    if workers > 1:
        return run_workers(WORKER, workers, arguments, timeout, cwd=folder)
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MS_")}
    environment["PYTHONPATH"] = os.pathsep.join([str(REPO), str(REPO / "tests")])
    command = [sys.executable, str(WORKER), *arguments]
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        env=environment,
        cwd=folder,
    )
    if done.returncode:
        raise WorkerError(f"ended with {done.returncode}:\n{tail(done.stdout)}", [done.stdout], 0)
    return [done.stdout]


def train(folder: Path, *, steps=20, mode="graph", **options) -> list[dict]:
    """Train and return the records of ``metrics.jsonl``."""
    folder.mkdir(parents=True, exist_ok=True)
    config = write_config(folder, **options)
    workers = options.get("dp", 1) * options.get("cp", 1)
    start(workers, [str(config), "--steps", str(steps), "--mode", mode], folder)
    return read_metrics(folder)


def read_metrics(folder: Path) -> list[dict]:
    """The records of a run's ``metrics.jsonl``."""
    return [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]


def prepare(folder: Path, *, cp=1, callbacks=(), changes=None, samples=13, **options) -> Path:
    """Write a run on this repository's documents, read by kcp's own loader.

    Args:
        folder: of the run; made if missing.
        cp: context parallel ranks.
        callbacks: the section of that name.
        changes: values of further keys, by dotted name.
        samples: of an epoch.
        options: as :func:`write_config` takes them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = write_config(folder, cp=cp, strategy="state_scan" if cp > 1 else "none", **options)
    run = yaml.safe_load(path.read_text())
    run["train_dataset"]["data_loader"] = {
        "type": "KcpTextDataset",
        "dataset_dir": str(REPO / "docs"),
        "num_samples": samples,
        "max_documents": 4,
    }
    run["train_dataset_task"]["dataset_config"] = run["train_dataset"]
    run["callbacks"] = list(callbacks)
    for dotted, value in (changes or {}).items():
        *sections, key = dotted.split(".")
        section = run
        for name in sections:
            section = section.setdefault(name, {})
        section[key] = value
    path.write_text(yaml.safe_dump(run))
    return path


def begin(path: Path, steps: int, *arguments, output=subprocess.PIPE) -> subprocess.Popen:
    """Start ``kcp train`` on a run file, its progress into ``output``."""
    command = [sys.executable, "-m", "kcp.cli", "train", str(path), "--steps", str(steps), *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    return subprocess.Popen(command, env=environment, cwd=path.parent, stdout=output, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen, code: int = 0, timeout: float = 800) -> str:
    """Wait for the end of a launcher; what it said on stderr."""
    try:
        _, said = process.communicate(timeout=timeout)
    finally:
        process.kill()
    assert process.returncode == code, said
    return said
