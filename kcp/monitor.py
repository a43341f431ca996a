"""What a run shows and leaves behind: progress lines, ``metrics.jsonl``, the loss curve; and when it must stop."""

import json
import math
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

import mindspore as ms

from kcp.digest import check_same_on_all_ranks, digests
from kcp.hf.tensors import StoredTensor
from kcp.weights import load_weights

METRICS_FILE = "metrics.jsonl"
CURVE_FILE = "loss.png"


class DivergedError(RuntimeError):
    """Too many steps in a row had gradients that are not finite."""


def _scalar(value: Any) -> float:
    return float(value.asnumpy()) if isinstance(value, ms.Tensor) else float(value)


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(int(round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}"


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


class KcpMonitor(ms.Callback):
    """Progress, metrics, loss curve, the check that ranks agree, and the stop of a diverged or finished run.

    Args:
        output_dir: Folder of ``metrics.jsonl`` and ``loss.png``; made if missing. Rank 0 alone writes.
        tokens_per_step: Tokens of a step over all ranks, for tokens per second.
        rank: This process's rank.
        world_size: Number of ranks; with more than one their digests are compared before the first step.
        config: The run's configuration in plain dicts, for the digest.
        stop_step: Step after which training stops; 0 for the end of the data.
        stream: Where progress is printed.

    Raises:
        RankMismatchError: Before the first step, if the ranks differ.
        DivergedError: After ``max_skipped_steps`` of the wrapper in a row without finite gradients.
    """

    def __init__(
        self,
        output_dir: str | Path,
        tokens_per_step: int,
        rank: int = 0,
        world_size: int = 1,
        config: Any = None,
        stop_step: int = 0,
        stream: TextIO | None = None,
    ):
        super().__init__()
        self.output_dir = Path(output_dir)
        self.tokens_per_step = tokens_per_step
        self.rank = rank
        self.world_size = world_size
        self.config = config
        self.stop_step = stop_step
        self.stream = stream or sys.stdout
        self.step = 0
        self.total = 0
        self.skipped = 0
        self.skipped_in_a_row = 0
        self.losses: list[float] = []
        self._step_begin = 0.0
        self._steady_seconds: list[float] = []

    def on_train_begin(self, run_context: Any) -> None:
        """Compare the ranks, count the steps, start the metrics file."""
        params = run_context.original_args()
        if self.world_size > 1:
            network = params.train_network
            check_same_on_all_ranks(digests(self.config, network.get_parameters()))
        self.total = params.epoch_num * params.batch_num
        if self.stop_step:
            self.total = min(self.total, self.stop_step)
        if self.rank == 0:
            self.output_dir.mkdir(parents=True, exist_ok=True)
            (self.output_dir / METRICS_FILE).write_text("")

    def on_train_step_begin(self, run_context: Any) -> None:
        """Start the step's clock."""
        self._step_begin = time.perf_counter()

    def on_train_step_end(self, run_context: Any) -> None:
        """Log the step; stop when it was the last one or the run has diverged."""
        params = run_context.original_args()
        loss, skipped, _, learning_rate, norm = (_scalar(value) for value in params.net_outputs)
        seconds = time.perf_counter() - self._step_begin
        self.step += 1
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0
        self.skipped += bool(skipped)
        self.losses.append(loss)
        if self.step > 1:
            self._steady_seconds.append(seconds)
        if self.rank == 0:
            self._log(loss, norm, learning_rate, bool(skipped), seconds)
        limit = params.train_network.max_skipped_steps
        if self.skipped_in_a_row >= limit:
            raise DivergedError(
                f"step {self.step}: gradients were not finite in {limit} steps in a row (max_skipped_steps); "
                f"last loss {loss:.6g}, gradient norm {norm:.6g}. Lower the learning rate or look at the data."
            )
        if self.step >= self.total:
            run_context.request_stop()

    def on_train_end(self, run_context: Any) -> None:
        """Draw the loss curve and say where everything is."""
        if self.rank != 0 or not self.losses:
            return
        curve = self._draw()
        first, last = self.losses[0], self.losses[-1]
        skipped = f", {self.skipped} skipped" if self.skipped else ""
        self._print(f"kcp: done: {self.step} steps{skipped}, loss {first:.4f} -> {last:.4f}")
        self._print(f"kcp: metrics: {self.output_dir / METRICS_FILE}")
        self._print(f"kcp: loss curve: {curve}")

    def _log(self, loss: float, norm: float, learning_rate: float, skipped: bool, seconds: float) -> None:
        speed = self.tokens_per_step / seconds
        record = {
            "step": self.step,
            "loss": loss if math.isfinite(loss) else None,
            "grad_norm": norm if math.isfinite(norm) else None,
            "lr": learning_rate,
            "tokens_per_second": round(speed, 2),
            "seconds": round(seconds, 6),
            "skipped": skipped,
        }
        with (self.output_dir / METRICS_FILE).open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        recent = self._steady_seconds[-20:] or [seconds]
        left = (self.total - self.step) * sum(recent) / len(recent)
        line = f"step {self.step}/{self.total}  loss {loss:.4f}  grad_norm {norm:.4f}  lr {learning_rate:.3g}"
        line += f"  {speed:.0f} tokens/s  eta {_duration(left)}"
        self._print(line + ("  SKIPPED: gradients are not finite" if skipped else ""))

    def _print(self, text: str) -> None:
        print(text, file=self.stream, flush=True)

    def _draw(self) -> Path:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7, 4), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        axes.plot(range(1, len(self.losses) + 1), self.losses, linewidth=1.2)
        axes.set_xlabel("step")
        axes.set_ylabel("loss (nats per token)")
        axes.grid(alpha=0.3)
        path = self.output_dir / CURVE_FILE
        figure.savefig(path, dpi=120)
        return path
