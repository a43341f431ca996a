"""The worker of a training run: ``python -m kcp.train CONFIG``, one process a rank, through MindFormers' own Trainer.

``kcp train CONFIG`` starts as many of these as the configuration needs. The worker checks the configuration, hands
MindFormers the part of it that MindFormers can run, and trains. Rank 0 prints progress on stdout; what MindFormers
prints goes to ``OUTPUT/mindformers_rank<R>.log``.

Exit codes: 0 done; 1 training failed; 2 the configuration can't be run.
"""

import argparse
import contextlib
import os
import shutil
import sys
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kcp.checkpoint import FOLDER, Checkpoint, find_checkpoint, read_checkpoint, resume_place
from kcp.config import ConfigError, RunConfig, load_run_config
from kcp.config_checks import LOADER, OWN_LOADERS, RECALL
from kcp.config_run import OWN_CALLBACKS, TRAINER
from kcp.data.text import DataError
from kcp.hf.errors import CheckpointError
from kcp.hf.tensors import StoredTensor
from kcp.outputs import writing
from kcp.weights import weights_of_run

MODES = {"graph": 0, "pynative": 1}
RUN_CONFIG = "config.yaml"  # the run's file, kept beside its results


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one worker.

    Args:
        arguments: Command line, without the program's name; by default this process's.

    Returns:
        0 when training came to its end, 2 when the configuration, weights or data can't be used (said on stderr, one line a reason).

    Raises:
        Exception: Whatever ended the training. The process must then end without waiting for its peers.
    """
    options = _parse(arguments)
    try:
        run = load_run_config(options.config, _launched_world_size())
    except ConfigError as error:
        for line in error.problems:
            print(f"kcp: error: {line}", file=sys.stderr)
        return 2
    try:
        train(run, options.output_dir, options.mode, options.steps, options.resume)
    except CheckpointError as error:
        for line in error.problems:
            print(f"kcp: error: {line}", file=sys.stderr)
        return 2
    except DataError as error:
        print(f"kcp: error: {error}", file=sys.stderr)
        return 2
    return 0


def run_worker(arguments: Sequence[str] | None = None) -> None:
    """:func:`main` as a whole process: never returns, and ends at once when training failed."""
    try:
        code = main(arguments)
    except Exception as error:
        if type(error).__name__ in ("RankMismatchError", "DivergedError", "OutputError"):
            print(f"kcp: error: {error}", file=sys.stderr)
        else:
            traceback.print_exception(error, file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        # Peers may be waiting in a collective that never comes, and an orderly shutdown would wait for them.
        os._exit(1)
    sys.exit(code)


def train(
    run: RunConfig, output_dir: str | None = None, mode: str | None = None, steps: int | None = None, resume: str | None = None
) -> None:
    """Train a checked configuration in this process, as one rank of its launch.

    Args:
        run: The configuration.
        output_dir: Folder for metrics, curve and logs, in place of the configuration's.
        mode: ``graph`` or ``pynative``, in place of ``context.mode``.
        steps: Number of steps, in place of ``runner_config.stop_step``.
        resume: Checkpoint to continue from: its folder, a run's output folder, or "" for this run's own newest one.

    Raises:
        RankMismatchError: The ranks do not run the same configuration, versions or initial parameters.
        DivergedError: Gradients stayed without finite values.
        OutputError: A file of the output folder can't be written.
        CheckpointError: ``load_checkpoint`` does not hold the model's tensors, the checkpoint to resume from can't be used, or one
            can't be written.
    """
    folder = Path(output_dir or run.training.output_dir).expanduser().resolve()
    place = resume_place(run, folder, resume)
    checkpoint = None if place is None else read_checkpoint(find_checkpoint(place))
    weights = weights_of_run(run) if checkpoint is None else None
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    os.environ["LOCAL_DEFAULT_PATH"] = str(folder)
    progress = sys.stdout
    rank = int(os.environ.get("RANK_ID", "0"))
    if rank == 0 and run.path.resolve() != folder / RUN_CONFIG:
        with writing(folder / RUN_CONFIG):
            shutil.copyfile(run.path, folder / RUN_CONFIG)
    log_path = folder / f"mindformers_rank{rank}.log"
    with writing(log_path):
        opened = log_path.open("w", buffering=1, encoding="utf-8")
    with opened as log:
        with contextlib.redirect_stdout(log):
            _train(run, folder, mode, steps, progress, weights, checkpoint)


def _train(
    run: RunConfig,
    folder: Path,
    mode: str | None,
    steps: int | None,
    progress: Any,
    weights: dict[str, StoredTensor] | None,
    checkpoint: Checkpoint | None,
) -> None:
    import mindspore as ms

    ms.set_device(run.training.device_target)
    if run.training.device_target == "CPU":
        ms.runtime.launch_blocking()

    from mindformers import Trainer
    from mindformers.core.context import build_context
    from mindspore.communication import GlobalComm, get_rank

    import kcp.data.loader  # noqa: F401  registers the dataset loaders
    import kcp.data.mindformers_sets  # noqa: F401
    import kcp.models  # noqa: F401  registers the model and its configuration
    import kcp.train_step  # noqa: F401  registers the one-step wrapper
    import kcp.trainer  # noqa: F401  registers the trainer
    from kcp.checkpoint_callbacks import CheckpointLoader, CheckpointWriter, WeightLoader
    from kcp.monitor import KcpMonitor

    config = mindformers_config(run, folder, mode, steps, checkpoint)
    stop_step = config.runner_config.stop_step or 0
    shared = {key: value for key, value in run.raw.items() if key != "output_dir"}
    build_context(config)
    monitor = KcpMonitor(
        folder,
        tokens_per_step=samples_per_step(run) * run.model.seq_length,
        rank=get_rank() if GlobalComm.INITED else 0,
        world_size=run.world_size,
        config={"file": shared, "mode": config.context.mode, "stop_step": stop_step},
        stop_step=stop_step,
        stream=progress,
        gauges=gauges_of(run, config),
        resumed=None if checkpoint is None else {"step": checkpoint.step, **checkpoint.state["counters"]},
    )
    callbacks = [monitor, CheckpointWriter(folder / FOLDER, run.checkpoint, monitor, about(run), start_samples(run, checkpoint))]
    if weights is not None:
        config.load_checkpoint = ""
        callbacks.insert(0, WeightLoader(weights))
    if checkpoint is not None:
        callbacks.insert(0, CheckpointLoader(checkpoint, check_data=not run.raw.get("ignore_data_skip")))
    Trainer(args=config, callbacks=callbacks).train()


def gauges_of(run: RunConfig, config: Any) -> list[Any]:
    """What the run measures beside its loss."""
    from mindformers.dataset import build_dataset

    from kcp.gauges import Evaluation, Health

    gauges: list[Any] = []
    if run.evaluation.every_steps:
        gauges.append(Evaluation(build_dataset(config.eval_dataset_task), run.evaluation.every_steps))
    if run.health.every_steps:
        gauges.append(Health(run.health.every_steps, run.training.gradient_accumulation_steps))
    return gauges


def samples_per_step(run: RunConfig) -> int:
    """Samples of one step over all replicas."""
    return run.training.batch_size * run.training.gradient_accumulation_steps * run.parallel.data_parallel


def start_samples(run: RunConfig, checkpoint: Checkpoint | None) -> int:
    """Samples that the data pipeline passes over before the first step."""
    return 0 if checkpoint is None or run.raw.get("ignore_data_skip") else checkpoint.state["samples"]


def about(run: RunConfig) -> dict[str, Any]:
    """What a checkpoint says about its run."""
    return {
        "loader": run.data.loader,
        "samples_per_step": samples_per_step(run),
        "model_config": run.raw["model"]["model_config"],
        "description": {**asdict(run.parallel), "batch_size": run.training.batch_size, "strategy": run.model.kda_cp_strategy},
    }


def mindformers_config(
    run: RunConfig, folder: Path, mode: str | None = None, steps: int | None = None, checkpoint: Checkpoint | None = None
) -> Any:
    """The configuration that MindFormers runs, from the user's.

    MindFormers resets ``parallel_config.context_parallel`` outside its semi-auto mode, so the degree moves to where kcp
    reads it, and for MindFormers every worker is a data-parallel one.
    """
    from mindformers.tools.register import MindFormerConfig

    config = MindFormerConfig(str(run.path))
    degree = run.parallel.context_parallel
    config.output_dir = str(folder)
    config.model.model_config.context_parallel_size = degree
    config.parallel_config.context_parallel = 1
    config.parallel_config.data_parallel = run.world_size
    loader = config.train_dataset.data_loader
    loader.context_parallel = degree
    loader.seq_length = run.model.seq_length
    if run.data.loader in (LOADER, RECALL):
        loader.vocab_size = run.model.vocab_size
    config.train_dataset_task.dataset_config = config.train_dataset
    if run.evaluation.every_steps:
        _evaluation_data(config, run)
    _continue_data(config, run, checkpoint)
    config.trainer.type = TRAINER
    # kcp evaluates itself: MindFormers' callback neither sums over ranks nor leaves the figure where the curve is.
    config.do_eval = False
    config.model.model_config.recompute = run.training.recompute
    if config.runner_wrapper is None:
        config.runner_wrapper = MindFormerConfig(type="KcpTrainOneStepCell")
    # MindFormers accumulates gradients in its semi-auto mode only; kcp's step cell splits the batch itself.
    config.runner_wrapper.setdefault("scale_sense", 1.0)
    config.runner_wrapper.accumulation_steps = run.training.gradient_accumulation_steps
    config.runner_config.batch_size = run.training.batch_size * run.training.gradient_accumulation_steps
    config.runner_config.gradient_accumulation_steps = 1
    # The monitor is always there; the stock one would need a Megatron-style configuration.
    own = (*OWN_CALLBACKS, "MFLossMonitor")
    config.callbacks = [callback for callback in config.callbacks or [] if callback.get("type") not in own]
    if mode is not None:
        config.context.mode = MODES[mode]
    if steps is not None:
        config.runner_config.stop_step = steps
    stop_step = config.runner_config.stop_step
    if stop_step:
        # Enough epochs for any data: the monitor stops the run.
        config.runner_config.epochs = stop_step
        schedule = config.lr_schedule
        if schedule is not None and schedule.total_steps in (None, -1):
            schedule.total_steps = stop_step
    return config


def _evaluation_data(config: Any, run: RunConfig) -> None:
    """Complete ``eval_dataset``: what it does not say is as in ``train_dataset``, and every pass gives the same samples."""
    from mindformers.tools.register import MindFormerConfig

    train, evaluate = config.train_dataset, config.eval_dataset
    for key in ("input_columns", "num_parallel_workers", "drop_remainder"):
        if evaluate.get(key) is None:
            evaluate[key] = train.get(key)
    evaluate.batch_size = run.training.batch_size
    loader = evaluate.data_loader
    loader.context_parallel = run.parallel.context_parallel
    loader.seq_length = run.model.seq_length
    if loader.type in OWN_LOADERS:
        loader.hold = True
    task = config.eval_dataset_task or MindFormerConfig(type=config.train_dataset_task.type)
    task.dataset_config = evaluate
    config.eval_dataset_task = task


def _continue_data(config: Any, run: RunConfig, checkpoint: Checkpoint | None) -> None:
    """Let the data go on where the checkpoint was written: kcp's loader starts there, others are skipped to it by MindSpore."""
    if checkpoint is None:
        return
    config.load_checkpoint = ""
    config.resume_training = False
    position = checkpoint.state["data"]["position"]
    if run.raw.get("ignore_data_skip"):
        return
    if position is not None and run.data.loader in OWN_LOADERS:
        config.train_dataset.data_loader.position = list(position)
    else:
        config.data_skip_steps = checkpoint.state["samples"] // samples_per_step(run)


def _launched_world_size() -> int:
    return int(os.environ.get("MS_WORKER_NUM") or os.environ.get("RANK_SIZE") or 1)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m kcp.train", description="One worker of a kcp training run.")
    parser.add_argument("config", help="MindFormers YAML file")
    parser.add_argument("--output-dir", help="folder for metrics, loss curve and logs (default: output_dir of CONFIG)")
    parser.add_argument("--mode", choices=sorted(MODES), help="execution mode (default: context.mode of CONFIG)")
    parser.add_argument("--steps", type=_positive, help="stop after so many steps (default: runner_config.stop_step)")
    parser.add_argument("--resume", nargs="?", const="", help="continue a checkpoint: a folder, or this run's own newest one")
    return parser.parse_args(arguments)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


if __name__ == "__main__":
    run_worker()
