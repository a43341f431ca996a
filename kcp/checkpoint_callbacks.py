"""What puts tensors into a run and takes them out of it: start weights, checkpoints in, checkpoints out."""

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor

import kcp
from kcp.checkpoint import Checkpoint, remove_left_overs, set_aside, write_checkpoint
from kcp.config_run import CheckpointOptions
from kcp.hf.errors import CheckpointError
from kcp.hf.tensors import StoredTensor
from kcp.monitor import KcpMonitor
from kcp.weights import load_weights


def random_state() -> dict[str, Any]:
    """State of every source of random numbers of this process, as JSON holds it."""
    version, numbers, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "python": [version, list(numbers), gauss],
        "numpy": [kind, keys.tolist(), position, has_gauss, cached],
        "mindspore": ms.get_rng_state().asnumpy().tolist(),
    }


def set_random_state(state: Mapping[str, Any]) -> None:
    """Go on with the random numbers where :func:`random_state` was taken."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, np.array(keys, np.uint32), position, has_gauss, cached))
    ms.set_rng_state(Tensor(np.array(state["mindspore"], np.uint8)))


def source_of(dataset: Any) -> Any:
    """The Python object that a MindSpore dataset reads its samples from; None when there is none, or several."""
    while dataset is not None:
        if getattr(dataset, "source", None) is not None:
            return dataset.source
        children = getattr(dataset, "children", [])
        dataset = children[0] if len(children) == 1 else None
    return None


def parameters_by_name(network: Any) -> dict[str, ms.Parameter]:
    """Every parameter of a training network, optimizer's included.

    Raises:
        RuntimeError: two have one name.
    """
    found: dict[str, ms.Parameter] = {}
    for parameter in network.get_parameters():
        if found.setdefault(parameter.name, parameter) is not parameter:
            raise RuntimeError(f"two parameters are called {parameter.name}")
    return found


class WeightLoader(ms.Callback):
    """Loads the weights that a run starts from, before the monitor compares the ranks.

    Args:
        tensors: What :func:`kcp.weights.weights_of_run` found.
    """

    def __init__(self, tensors: Mapping[str, StoredTensor]):
        super().__init__()
        self.tensors = tensors

    def on_train_begin(self, run_context: Any) -> None:
        """Put the tensors into the network's parameters."""
        load_weights(run_context.original_args().train_network, self.tensors)


class CheckpointLoader(ms.Callback):
    """Continues a run: parameters, optimizer and random numbers of a checkpoint, before the monitor compares the ranks.

    Args:
        checkpoint: As :func:`kcp.checkpoint.read_checkpoint` returns it.
        check_data: Whether the text and the loader's options must be those of the checkpoint.

    Raises:
        CheckpointError: It is of another model, optimizer or text; nothing was changed then.
    """

    def __init__(self, checkpoint: Checkpoint, check_data: bool = True):
        super().__init__()
        self.checkpoint = checkpoint
        self.check_data = check_data

    def on_train_begin(self, run_context: Any) -> None:
        """Check everything, then set everything."""
        params = run_context.original_args()
        parameters = parameters_by_name(params.train_network)
        self.checkpoint.check({name: (str(p.dtype).lower(), tuple(p.shape)) for name, p in parameters.items()})
        if self.check_data:
            self._check_data(getattr(source_of(params.train_dataset), "identity", {}))
        for name, value in self.checkpoint.read():
            parameters[name].set_data(Tensor(value))
        set_random_state(self.checkpoint.state["random"])

    def _check_data(self, now: Mapping[str, Any]) -> None:
        before = self.checkpoint.state["data"]["identity"]
        problems = [
            f"train_dataset.data_loader: {key} is {now.get(key)!r}, the checkpoint's position belongs to {before.get(key)!r}; "
            "use that, or start the data again with ignore_data_skip: True"
            for key in sorted({*before, *now})
            if before.get(key) != now.get(key)
        ]
        if problems:
            raise CheckpointError(problems)


class CheckpointWriter(ms.Callback):
    """Writes checkpoints on rank 0; every rank holds the same parameters. Runs after the monitor.

    Args:
        folder: The run's folder of checkpoints.
        options: When, and how many stay.
        monitor: Knows the step and the counters.
        run: What is written about the run: ``loader``, ``samples_per_step``, ``model_config`` and ``description``.
        start_samples: Samples that earlier parts of the run have taken.
    """

    def __init__(self, folder: Path, options: CheckpointOptions, monitor: KcpMonitor, run: Mapping[str, Any], start_samples: int = 0):
        super().__init__()
        self.folder = folder
        self.options = options
        self.monitor = monitor
        self.run = run
        self.start_samples = start_samples
        self.first_step = monitor.step

    def on_train_begin(self, run_context: Any) -> None:
        """Clear what an interrupted write left, and set aside the checkpoints of another course."""
        if self.monitor.rank == 0:
            remove_left_overs(self.folder)
            aside = set_aside(self.folder, self.first_step)
            if aside is not None:
                self.monitor.say(f"kcp: checkpoints of later steps, from an earlier run, are now in {aside}")

    def on_train_step_end(self, run_context: Any) -> None:
        """Write a checkpoint when one is due."""
        step, options = self.monitor.step, self.options
        due = options.save_steps and step % options.save_steps == 0
        last = options.save_steps and options.save_at_end and run_context.get_stop_requested()
        if self.monitor.rank == 0 and (due or last):
            self.write(run_context.original_args())

    def write(self, params: Any) -> Path:
        """Write a checkpoint of this moment."""
        parameters = parameters_by_name(params.train_network)
        # What the network itself holds are weights; the rest is the optimizer's.
        weights = {parameter.name for parameter in params.train_network.network.get_parameters()}
        values = {name: np.ascontiguousarray(parameter.asnumpy()) for name, parameter in parameters.items()}
        source, steps = source_of(params.train_dataset), self.monitor.step - self.first_step
        position = list(source.position(steps)) if hasattr(source, "position") else None
        state = {
            "step": self.monitor.step,
            "samples": self.start_samples + steps * self.run["samples_per_step"],
            "data": {"loader": self.run["loader"], "position": position, "identity": getattr(source, "identity", {})},
            "random": random_state(),
            "counters": self.monitor.counters(),
            "run": {**self.run["description"], "versions": {"kcp": kcp.__version__, "mindspore": ms.__version__}},
        }
        return write_checkpoint(
            self.folder,
            {name: value for name, value in values.items() if name in weights},
            {name: value for name, value in values.items() if name not in weights},
            state,
            self.run["model_config"],
            self.options.keep_last,
        )
