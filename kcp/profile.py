"""``kcp profile``: the time of a training step by layer, and the bytes and time of every exchange, measured in a launch of its own.

Every kind of layer is compiled alone, with the run's shapes and all ranks taking part, and timed forward and forward plus backward; then
the whole step. What the layers' sum leaves of the step is the optimizer, the reduction of gradients, clipping and the residual stream.
Exchanges are counted in PyNative (a graph can't count its runs), one pass of each kind of layer, and an exchange of as many bytes is timed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kcp.config import RunConfig, load_run_config

_WARM_UP = 2


def profile_run(run: RunConfig, steps: int) -> dict[str, Any]:
    """Start the run's workers and measure.

    Args:
        run: a checked configuration for CPUs.
        steps: repetitions that are measured.

    Returns:
        ``layers``: rows of name, count, forward and backward seconds (medians of rank 0); ``exchanges``: rows of layer, purpose, calls,
        logical and physical bytes of one pass, seconds of an exchange of so many bytes; ``step``: seconds; ``run``: the run's sizes.

    Raises:
        kcp.launch.LaunchError: the workers can't be started, or one failed.
    """
    from kcp.launch import LaunchError, LaunchOptions, launch

    with tempfile.TemporaryDirectory() as folder:
        arguments = ["kcp.profile", str(run.path.resolve()), "--folder", folder, "--steps", str(steps)]
        code = launch(arguments, LaunchOptions(workers=run.world_size, log_dir=Path(folder) / "logs"))
        if code:
            raise LaunchError(f"a worker of the profile ended with code {code}")
        return json.loads((Path(folder) / "rank0.json").read_text(encoding="utf-8"))


def profile_text(figures: dict[str, Any]) -> str:
    """The tables of ``kcp profile``."""
    step, about = figures["step"], figures["run"]
    lines = [
        f"{about['ranks']} ranks share a sample, {about['strategy']}; {about['batch']} x {about['tokens']} tokens a step, "
        f"{about['threads']} threads a rank",
        f"a step takes {1e3 * step:.1f} ms: {about['batch'] * about['tokens'] / step:.0f} tokens/s",
        "",
        f"{'layer':<18}{'count':>6}{'forward ms':>12}{'backward ms':>12}{'all ms':>9}{'of step':>9}",
    ]
    named = 0.0
    for row in figures["layers"]:
        whole = row["count"] * (row["forward"] + row["backward"])
        named += whole
        lines.append(
            f"{row['name']:<18}{row['count']:>6}{1e3 * row['forward']:>12.2f}{1e3 * row['backward']:>12.2f}"
            f"{1e3 * whole:>9.1f}{whole / step:>9.1%}"
        )
    rest = step - named
    lines.append(f"{'optimizer, rest':<18}{'':>6}{'':>12}{'':>12}{1e3 * rest:>9.1f}{rest / step:>9.1%}")
    if figures["exchanges"]:
        lines += [
            "",
            f"{'exchange':<18}{'for':<14}{'calls':>6}{'logical KB':>12}{'moved KB':>10}{'ms':>9}   one pass of one layer, both ways",
        ]
        for row in figures["exchanges"]:
            lines.append(
                f"{row['layer']:<18}{row['purpose']:<14}{row['calls']:>6}{row['logical'] / 1e3:>12.1f}{row['physical'] / 1e3:>10.1f}"
                f"{1e3 * row['seconds']:>9.2f}"
            )
    return "\n".join(lines)


def _median(work: Callable[[], Any], steps: int) -> float:
    seconds = []
    for i in range(_WARM_UP + steps):
        begin = time.perf_counter()
        work()
        if i >= _WARM_UP:
            seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


class _Worker:
    """One rank of the profile."""

    def __init__(self, run: RunConfig, steps: int):
        import mindspore as ms
        import numpy as np

        self.ms, self.run, self.steps = ms, run, steps
        ms.set_device("CPU")
        ms.runtime.launch_blocking()
        ms.set_context(mode=ms.GRAPH_MODE, jit_config={"jit_level": "O0"})
        if run.world_size > 1:
            from mindspore.communication import init

            init()
        np.random.seed(0)
        from kcp.models import KimiLinearConfig, KimiLinearForCausalLM

        options = {**run.raw["model"]["model_config"], "context_parallel_size": run.parallel.context_parallel}
        self.model = KimiLinearForCausalLM(KimiLinearConfig(**options))
        rng = np.random.default_rng(0)
        shape = (run.training.batch_size, run.model.seq_length)
        self.ids = ms.Tensor(rng.integers(0, run.model.vocab_size, shape).astype(np.int32))
        self.labels = ms.Tensor(rng.integers(0, run.model.vocab_size, shape).astype(np.int32))
        boundaries = np.full((shape[0], run.data.max_documents + 1), shape[1], np.int32)
        boundaries[:, 0] = 0
        self.boundaries = ms.Tensor(boundaries)
        self.mask = ms.Tensor(np.ones(shape, np.float32))
        local = shape[1] // run.parallel.context_parallel
        self.hidden = ms.Tensor(rng.standard_normal((shape[0], local, run.model.hidden_size)).astype(np.float32))

    def parts(self) -> list[tuple[str, int, Any, bool]]:
        """``(name, how many, cell, whether it takes boundaries)`` of every kind of layer."""
        model, layers = self.run.model, list(self.model.model.layers)
        parts = []
        for name, kinds, kind, attribute in (
            ("KDA", model.layer_types, "linear_attention", "self_attn"),
            ("MLA", model.layer_types, "full_attention", "self_attn"),
            ("dense MLP", model.mlp_layer_types, "dense", "block_sparse_moe"),
            ("experts", model.mlp_layer_types, "sparse", "block_sparse_moe"),
        ):
            if kind in kinds:
                parts.append((name, list(kinds).count(kind), getattr(layers[list(kinds).index(kind)], attribute), attribute == "self_attn"))
        return parts + [("norm", 2 * len(layers) + 1, self.model.model.norm, False)]

    def layers(self) -> list[dict[str, Any]]:
        rows = [
            {"name": name, "count": count, **self._forward_and_backward(cell, (self.hidden,) + ((self.boundaries,) if bounded else ()))}
            for name, count, cell, bounded in self.parts()
        ]
        return rows + [{"name": "head and loss", "count": 1, **self._head()}]

    def _forward_and_backward(self, cell, inputs):
        ms = self.ms
        weights = cell.trainable_params()
        cell.set_train()

        def total(*inputs):
            return (cell(*inputs) * self.hidden).sum()

        def output(*inputs):
            return cell(*inputs)

        both, forward = ms.jit(ms.value_and_grad(total, 0, weights)), ms.jit(output)
        seconds = _median(lambda: forward(*inputs).asnumpy(), self.steps)
        return {"forward": seconds, "backward": max(0.0, _median(lambda: both(*inputs)[0].asnumpy(), self.steps) - seconds)}

    def _head(self):
        ms, model = self.ms, self.model
        begin, end = model.group.slice_bounds(self.ids.shape[1])
        labels = self.labels[:, begin:end].reshape((-1,))
        weights = self.mask[:, begin:end].reshape((-1,))
        hidden = self.hidden.reshape((-1, self.hidden.shape[-1]))
        if not model.tied:
            parameters = model.lm_head.trainable_params()
        else:
            parameters = model.model.embed_tokens.trainable_params()

        def loss(hidden):
            return model.loss(model.logits_of(hidden), labels, weights)

        both, forward = ms.jit(ms.value_and_grad(loss, 0, parameters)), ms.jit(loss)
        seconds = _median(lambda: forward(hidden).asnumpy(), self.steps)
        return {"forward": seconds, "backward": max(0.0, _median(lambda: both(hidden)[0].asnumpy(), self.steps) - seconds)}

    def step(self) -> float:
        from mindformers.core.optim import AdamW

        from kcp.train_step import KcpTrainOneStepCell

        optimizer = AdamW(self.model.trainable_params(), 1e-4, betas=(0.9, 0.95), eps=1e-8)
        step = KcpTrainOneStepCell(self.model, optimizer)
        step.set_train()
        return _median(lambda: step(self.ids, self.labels, self.mask, self.boundaries)[0].asnumpy(), self.steps)

    def exchanges(self) -> list[dict[str, Any]]:
        """Bytes by layer and purpose of one pass forward and backward, counted in PyNative, and the time of an exchange of so many."""
        ms, group = self.ms, self.model.group
        if group.size == 1:
            return []
        ms.set_context(mode=ms.PYNATIVE_MODE)
        rows = []
        for name, _, cell, bounded in self.parts():
            if not bounded:
                continue
            before = group.traffic.read()
            inputs = (self.hidden, self.boundaries)
            ms.value_and_grad(lambda x, cu, cell=cell: (cell(x, cu) * self.hidden).sum(), 0, cell.trainable_params())(*inputs)
            for purpose, after in group.traffic.read().items():
                calls = after.exchanges - before[purpose].exchanges
                if calls:
                    row = {"layer": name, "purpose": purpose, "calls": calls}
                    row["logical"] = after.logical - before[purpose].logical
                    row["physical"] = after.physical - before[purpose].physical
                    rows.append(row)
        self._time(rows, group)
        return rows

    def _time(self, rows, group):
        """Seconds of all exchanges of a row as all-gathers of equal size; every rank times the same sizes."""
        import numpy as np
        from mindspore import ops

        sizes = np.array([[row["calls"], row["physical"]] for row in rows], np.float32)
        longest = ops.AllGather()(self.ms.Tensor(sizes)).asnumpy().reshape((-1,) + sizes.shape)[..., 1].max(0)
        for row, moved in zip(rows, longest, strict=True):
            payload = max(1, int(moved / row["calls"] / (group.size - 1) / 4))
            tensor = self.ms.Tensor(np.zeros(payload, np.float32))
            row["seconds"] = row["calls"] * _median(
                lambda tensor=tensor: group.collectives.all_gather(tensor, "state").asnumpy(), self.steps
            )


def main(argv: Sequence[str]) -> int:
    """One worker: measures, and writes ``rank<R>.json``."""
    parser = argparse.ArgumentParser(prog="python -m kcp.profile")
    parser.add_argument("config")
    parser.add_argument("--folder", required=True)
    parser.add_argument("--steps", type=int, required=True)
    options = parser.parse_args(argv)
    run = load_run_config(options.config)
    worker = _Worker(run, options.steps)
    figures = {"layers": worker.layers(), "step": worker.step(), "exchanges": worker.exchanges()}
    figures["run"] = {
        "ranks": run.parallel.context_parallel,
        "strategy": run.model.kda_cp_strategy,
        "batch": run.training.batch_size * run.parallel.data_parallel,
        "tokens": run.model.seq_length,
        "threads": os.environ.get("KCP_NUM_THREADS") or "all",
    }
    path = Path(options.folder) / f"rank{os.environ.get('RANK_ID', '0')}.json"
    path.write_text(json.dumps(figures), encoding="utf-8")
    return 0
