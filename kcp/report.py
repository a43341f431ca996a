"""``kcp report``: one HTML page about a run, from what it left behind. Pictures are inline SVG; the page loads nothing from anywhere."""

from __future__ import annotations

import html
import io
import json
import math
import os
import statistics
import tempfile
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import yaml

METRICS_FILE = "metrics.jsonl"
CONFIG_FILE = "config.yaml"
REPORT_FILE = "report.html"
_MOST_LAYERS = 12  # more lines than this in a picture say nothing
_HEALTH = {
    "log_decay_mean": "mean log decay a token",
    "log_decay_min": "fastest log decay a token",
    "log_decay_max": "slowest log decay a token",
    "beta_mean": "mean write strength",
    "output_gate_mean": "mean output gate",
    "state_norm": "norm of the state",
    "vanished_heads": "heads whose transition has vanished (fraction)",
}
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 68em; padding: 0 1em; color: #1b1f24; background: #fff; }
h1 { font-size: 1.5em; margin-bottom: 0; } h2 { font-size: 1.15em; margin: 2em 0 .5em; border-bottom: 1px solid #d8dee4; }
.sub { color: #57606a; margin-top: .2em; } .tiles { display: flex; flex-wrap: wrap; gap: .8em; margin: 1.2em 0; }
.tile { border: 1px solid #d8dee4; border-radius: 6px; padding: .5em .9em; } .tile b { display: block; font-size: 1.25em; }
.tile span { color: #57606a; font-size: .85em; }
.plots { display: grid; grid-template-columns: repeat(auto-fill, minmax(30em, 1fr)); gap: 1em; }
figure { margin: 0; } svg { width: 100%; height: auto; } pre { background: #f6f8fa; padding: 1em; overflow-x: auto; font-size: .85em; }
.bad { color: #b42318; }
"""


class ReportError(ValueError):
    """A run folder can't be reported on; one line."""


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The rows of ``metrics.jsonl``; a last line that is cut off (the run is being written) is left out.

    Raises:
        ReportError: no such file, nothing in it, or a line that is not a row.
    """
    path = folder / METRICS_FILE
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ReportError(f"{path}: can't be read: {error.strerror}; the output folder of a run is needed") from None
    except UnicodeDecodeError:
        raise ReportError(f"{path}: is not text") from None
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except ValueError:
            if number == len(lines):
                break
            raise ReportError(f"{path}, line {number}: is not JSON") from None
        if not isinstance(row, dict) or not isinstance(row.get("step"), int):
            raise ReportError(f"{path}, line {number}: has no step")
        rows.append(row)
    if not rows:
        raise ReportError(f"{path}: holds no step yet")
    return rows


def write_report(run_dir: Path, config: str | Path | None = None, output: str | Path | None = None) -> Path:
    """Write the page of a run, whole or not at all.

    Args:
        run_dir: output folder of a run.
        config: the run's YAML; by default ``config.yaml`` of the folder, or none.
        output: the page; by default ``report.html`` of the folder.

    Returns:
        Path of the page.

    Raises:
        ReportError: the folder holds no metrics, or the page can't be written.
        kcp.config.ConfigError: the YAML is not a run.
    """
    rows = read_metrics(run_dir)
    if config is None and (run_dir / CONFIG_FILE).is_file():
        config = run_dir / CONFIG_FILE
    text = page(run_dir.resolve().name, rows, *_configuration(Path(config) if config else None))
    target = Path(output) if output else run_dir / REPORT_FILE
    temporary = None
    try:
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=target.parent, prefix=f".{target.name}-", delete=False) as file:
            temporary = Path(file.name)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(0o644)
        os.replace(temporary, target)
    except OSError as error:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
        raise ReportError(f"{target}: can't be written: {error.strerror}") from None
    return target


def _configuration(path: Path | None) -> tuple[str, str]:
    """``(the YAML as text, the table of kcp plan)``; empty where there is none."""
    if path is None:
        return "", ""
    from kcp.cli_parallel import plan_of, plan_text
    from kcp.config import load_run_config

    run = load_run_config(path)
    text = yaml.safe_dump(dict(run.raw), sort_keys=False, default_flow_style=None, width=120, allow_unicode=True)
    if run.parallel.context_parallel == 1 or "linear_attention" not in run.model.layer_types:
        return text, ""
    return text, plan_text(*plan_of(run), run.model.kda_cp_strategy)


def page(name: str, rows: Sequence[dict[str, Any]], config: str = "", plan: str = "") -> str:
    """The page as text.

    Args:
        name: of the run.
        rows: of ``metrics.jsonl``.
        config: the run's YAML, shown as it is.
        plan: the table of ``kcp plan``.
    """
    parts = [
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>kcp: {html.escape(name)}</title>'
        f"<style>{_STYLE}</style></head><body>",
        f'<h1>{html.escape(name)}</h1><p class="sub">{rows[-1]["step"]} steps</p>',
        _tiles(rows),
    ]
    parts += _section("Training", _training_plots(rows))
    parts += _section("KDA layers", _layer_plots(rows, "health", _HEALTH))
    parts += _section("Experts", _layer_plots(rows, "moe", {"max_over_mean": "busiest expert over the mean"}))
    for title, text in (("Plan", plan), ("Configuration", config)):
        if text:
            parts.append(f"<h2>{title}</h2><pre>{html.escape(text)}</pre>")
    return "\n".join(parts) + "\n</body></html>\n"


def _section(title: str, plots: Iterable[str]) -> list[str]:
    figures = "\n".join(f"<figure>{plot}</figure>" for plot in plots)
    return [f'<h2>{title}</h2>\n<div class="plots">{figures}</div>'] if figures else []


def _tiles(rows: Sequence[dict[str, Any]]) -> str:
    losses, speeds = _series(rows, "loss"), _series(rows, "tokens_per_second")
    skipped = sum(bool(row.get("skipped")) for row in rows)
    tiles = []
    if losses:
        tiles.append((f"{losses[0][1]:.4f} → {losses[-1][1]:.4f}", "loss, first and last step"))
    evaluated = _series(rows, "eval_loss")
    if evaluated:
        tiles.append((f"{evaluated[-1][1]:.4f}", f"evaluation loss at step {evaluated[-1][0]}"))
    if len(speeds) > 1:
        tiles.append((f"{statistics.median(speed for _, speed in speeds[1:]):,.0f}", "tokens/s, median after the first step"))
    seconds = sum(value for _, value in _series(rows, "seconds"))
    if seconds:
        tiles.append((f"{seconds:,.0f} s", "in training steps"))
    tiles.append((f'<i class="bad">{skipped}</i>' if skipped else "0", "steps skipped (gradients not finite)"))
    return (
        '<div class="tiles">' + "".join(f'<div class="tile"><b>{value}</b><span>{label}</span></div>' for value, label in tiles) + "</div>"
    )


def _number(value: Any) -> float | None:
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if good else None


def _series(rows: Iterable[dict[str, Any]], key: str, pick: Callable[[dict], Any] | None = None) -> list[tuple[int, float]]:
    """``(step, value)`` of the rows that have a finite one."""
    pairs = ((row["step"], _number(pick(row) if pick else row.get(key))) for row in rows)
    return [(step, value) for step, value in pairs if value is not None]


def _training_plots(rows: Sequence[dict[str, Any]]) -> list[str]:
    plots = []
    loss = {"training": _series(rows, "loss"), "evaluation": _series(rows, "eval_loss")}
    for title, lines, marks in (
        ("loss (nats a token)", loss, ("evaluation",)),
        ("tokens a second", {"": _series(rows[1:], "tokens_per_second")}, ()),
        ("gradient norm before clipping", {"": _series(rows, "grad_norm")}, ()),
        ("learning rate", {"": _series(rows, "lr")}, ()),
        ("evaluation perplexity", {"": _series(rows, "eval_perplexity")}, ("",)),
    ):
        if any(lines.values()):
            plots.append(_plot(title, lines, marks))
    return plots


def _layer_plots(rows: Sequence[dict[str, Any]], group: str, titles: dict[str, str]) -> list[str]:
    """One picture a figure, one line a layer."""
    layers = sorted({layer for row in rows for layer in (row.get(group) or {})}, key=lambda layer: int(layer.rsplit("_", 1)[-1]))
    if len(layers) > _MOST_LAYERS:
        layers = [layers[round(i * (len(layers) - 1) / (_MOST_LAYERS - 1))] for i in range(_MOST_LAYERS)]
    plots = []
    for key, title in titles.items():
        lines = {layer.replace("_", " "): _series(rows, key, partial(_figure, group, layer, key)) for layer in layers}
        if any(lines.values()):
            plots.append(_plot(title, lines, ()))
    return plots


def _figure(group: str, layer: str, key: str, row: dict[str, Any]) -> Any:
    return ((row.get(group) or {}).get(layer) or {}).get(key)


def _plot(title: str, lines: dict[str, list[tuple[int, float]]], marks: Sequence[str]) -> str:
    """An SVG element."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.6, 2.9), layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.add_subplot()
    for name, points in lines.items():
        if points:
            steps, values = zip(*points, strict=True)
            axes.plot(steps, values, linewidth=1.2, label=name, marker="o" if name in marks or len(points) == 1 else None, markersize=3)
    axes.set_title(title, fontsize=10)
    axes.set_xlabel("step", fontsize=9)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.3)
    if sum(bool(points) for points in lines.values()) > 1:
        axes.legend(fontsize=7, ncols=2 if len(lines) > 4 else 1)
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": title}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]
