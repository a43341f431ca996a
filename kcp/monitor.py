"""What a run shows and leaves behind: progress lines, ``metrics.jsonl``, the loss curve; and when it must stop."""

import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TextIO

import mindspore as ms
from mindformers.utils.tensorboard import get_tensorboard_writer

from kcp.digest import check_same_on_all_ranks, digests
from kcp.outputs import writing

METRICS_FILE = "metrics.jsonl"
CURVE_FILE = "loss.png"
_TAGS = {"grad_norm": "grad-norm", "lr": "learning-rate", "eval_loss": "eval-loss", "eval_perplexity": "eval-perplexity"}


class DivergedError(RuntimeError):
    """Too many steps in a row had gradients that are not finite."""


def _scalar(value: Any) -> float:
    return float(value.asnumpy()) if isinstance(value, ms.Tensor) else float(value)


def read_metrics(folder: Path, last_step: int) -> list[dict[str, Any]]:
    """Records of a run's ``metrics.jsonl`` up to a step; a line that an interrupted run left half written is passed over."""
    path = folder / METRICS_FILE
    records = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else ():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and record.get("step", last_step + 1) <= last_step and "loss" in record:
            records.append(record)
    return records


def write_scalars(writer: Any, record: Mapping[str, Any]) -> None:
    """A step's record for TensorBoard, with MindFormers' tags where it has some; ``writer`` is MindFormers' own, None without one."""
    if writer is None:
        return

    def visit(prefix: str, values: Mapping[str, Any]) -> None:
        for key, value in values.items():
            if isinstance(value, Mapping):
                visit(f"{prefix}{key}/", value)
            elif key != "step" and value is not None:
                writer.add_scalar(prefix + _TAGS.get(key, key), float(value), global_step=record["step"])

    visit("", record)


def replace_text(path: Path, text: str) -> None:
    """Write a file whole: a reader sees the old content or the new one."""
    temporary = path.with_name(f".{path.name}.new")
    with writing(path):
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(int(round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}"


class Gauge(Protocol):
    """Something that is measured at an interval, on every rank alike."""

    def begin(self, params: Any) -> None:
        """Training begins; ``params`` as MindSpore hands them to callbacks."""

    def measure(self, step: int, params: Any) -> tuple[dict[str, Any], str]:
        """What this step adds to its record in ``metrics.jsonl``, and to its progress line; both empty when nothing is due."""


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
        gauges: What else is measured.
        resumed: Step and counters of the checkpoint that the run continues; its earlier metrics stay, later ones go.

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
        gauges: Sequence[Gauge] = (),
        resumed: Mapping[str, int] | None = None,
    ):
        super().__init__()
        self.output_dir = Path(output_dir)
        self.tokens_per_step = tokens_per_step
        self.rank = rank
        self.world_size = world_size
        self.config = config
        self.stop_step = stop_step
        self.stream = stream or sys.stdout
        self.gauges = gauges
        resumed = resumed or {}
        self.step = resumed.get("step", 0)
        self.first_step = self.step
        self.total = 0
        self.skipped = resumed.get("skipped", 0)
        self.skipped_in_a_row = resumed.get("skipped_in_a_row", 0)
        self.losses: list[tuple[int, float]] = []
        self._step_begin = 0.0
        self._steady_seconds: list[float] = []

    def on_train_begin(self, run_context: Any) -> None:
        """Compare the ranks, count the steps, start the metrics file."""
        params = run_context.original_args()
        if self.world_size > 1:
            network = params.train_network
            check_same_on_all_ranks(digests(self.config, network.get_parameters()))
        for gauge in self.gauges:
            gauge.begin(params)
        self.total = params.epoch_num * params.batch_num
        if self.stop_step:
            self.total = min(self.total, self.stop_step)
        if self.rank == 0:
            with writing(self.output_dir):
                self.output_dir.mkdir(parents=True, exist_ok=True)
            kept = read_metrics(self.output_dir, self.step) if self.step else []
            self.losses = [(record["step"], math.nan if record["loss"] is None else record["loss"]) for record in kept]
            replace_text(self.output_dir / METRICS_FILE, "".join(json.dumps(record) + "\n" for record in kept))
            if self.step:
                self.say(f"kcp: resumed after step {self.step}")

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
        self.losses.append((self.step, loss))
        if self.step > self.first_step + 1:
            self._steady_seconds.append(seconds)
        measured, remarks = {}, ""
        for gauge in self.gauges:
            found, remark = gauge.measure(self.step, params)
            measured |= found
            remarks += remark
        if self.rank == 0:
            self._log(loss, norm, learning_rate, bool(skipped), seconds, measured, remarks)
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
        first, last = self.losses[0][1], self.losses[-1][1]
        skipped = f", {self.skipped} skipped" if self.skipped else ""
        self.say(f"kcp: done: {self.step} steps{skipped}, loss {first:.4f} -> {last:.4f}")
        self.say(f"kcp: metrics: {self.output_dir / METRICS_FILE}")
        self.say(f"kcp: loss curve: {curve}")

    def counters(self) -> dict[str, int]:
        """What a checkpoint keeps of the monitor, beside the step."""
        return {"skipped": self.skipped, "skipped_in_a_row": self.skipped_in_a_row}

    def _log(
        self, loss: float, norm: float, learning_rate: float, skipped: bool, seconds: float, measured: Mapping[str, Any], remarks: str
    ) -> None:
        speed = self.tokens_per_step / seconds
        record = {
            "step": self.step,
            "loss": loss if math.isfinite(loss) else None,
            "grad_norm": norm if math.isfinite(norm) else None,
            "lr": learning_rate,
            "tokens_per_second": round(speed, 2),
            "seconds": round(seconds, 6),
            "skipped": skipped,
            **measured,
        }
        path = self.output_dir / METRICS_FILE
        with writing(path), path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        write_scalars(get_tensorboard_writer(), record)
        recent = self._steady_seconds[-20:] or [seconds]
        left = (self.total - self.step) * sum(recent) / len(recent)
        line = f"step {self.step}/{self.total}  loss {loss:.4f}  grad_norm {norm:.4f}  lr {learning_rate:.3g}"
        line += f"  {speed:.0f} tokens/s  eta {_duration(left)}"
        self.say(line + remarks + (f"  SKIPPED ({self.skipped} so far): gradients are not finite" if skipped else ""))

    def say(self, text: str) -> None:
        """Print a line of progress."""
        print(text, file=self.stream, flush=True)

    def _draw(self) -> Path:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7, 4), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        axes.plot(*zip(*self.losses, strict=True), linewidth=1.2)
        axes.set_xlabel("step")
        axes.set_ylabel("loss (nats per token)")
        axes.grid(alpha=0.3)
        path = self.output_dir / CURVE_FILE
        with writing(path):
            figure.savefig(path, dpi=120)
        return path
