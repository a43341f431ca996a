"""Memory that a training run takes on the CPU, before it is tried: an estimate by its parts, and what the machine has.

Bytes of one worker at the peak of a step, everything in float32 (P parameters, N = batch T / W tokens of the worker):

    process       what MindSpore, MindFormers and the step itself take without a model
    parameters    ``copies`` P: weights, both moments, gradients, the vectors that the step reduces, checks and clips, what is in between
    activations   numbers that a layer keeps a token from forward to backward, times N, layers and ``kept``; with recomputation in
                  PyNative one layer at a time and every layer's input (a graph's peak did not fall by it); a graph's grows with
                  all experts, not the chosen ones alone
    logits        N x vocabulary, 3 times: logits, their gradient, what is in between; ``COMPOSITE_LOGITS`` times where the cross entropy
                  does not run on the native kernels (whole tensors in float64)

The constants were fitted to measured peaks of runs with large weights, many tokens, wide heads and a large vocabulary, by mode: a graph
takes more than PyNative, which frees as it goes. The estimate was within a factor of :data:`FACTOR` of every one of them.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from kcp.hf.config_json import MLA, SPARSE
from kcp.hf.tensors import expected_shapes

if TYPE_CHECKING:
    from kcp.config import ModelOptions, RunConfig

FACTOR = 2.0
FLOAT32 = 4
LOGITS, COMPOSITE_LOGITS = 3, 19
KERNELS = Path(__file__).parent / "ops" / "backends" / "native" / "libkcp_native.so"
GIB = 1 << 30


@dataclass(frozen=True)
class _Mode:
    process: int
    copies: int
    kept: float
    graph: bool


_MODES = {0: _Mode(830 << 20, 17, 1.5, True), 1: _Mode(660 << 20, 10, 1.15, False)}  # context.mode: graph, PyNative


@dataclass(frozen=True)
class Memory:
    """Bytes of one worker at the peak of a step.

    Attributes:
        process, parameters, activations, logits: the parts.
    """

    process: int
    parameters: int
    activations: int
    logits: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.process + self.parameters + self.activations + self.logits


def estimate_memory(run: RunConfig, batch_size: int | None = None) -> Memory:
    """What one worker of a run takes.

    Args:
        run: the configuration.
        batch_size: in place of the run's.
    """
    model, mode = run.model, _MODES[run.training.mode]
    tokens = (batch_size or run.training.batch_size) * run.local_seq_length
    parameters = sum(prod(shape) for shape in expected_shapes(asdict(model)).values())
    kinds = zip(model.layer_types, model.mlp_layer_types, strict=True)
    layers = [_kept_by_layer(model, run.parallel.context_parallel, mode.graph, *pair) for pair in kinds]
    numbers = max(layers) + model.hidden_size * len(layers) if run.training.recompute and not mode.graph else sum(layers)
    return Memory(
        process=mode.process,
        parameters=mode.copies * FLOAT32 * parameters,
        activations=int(mode.kept * FLOAT32 * tokens * numbers),
        logits=(LOGITS if _native_kernels() else COMPOSITE_LOGITS) * FLOAT32 * tokens * model.vocab_size,
    )


def _native_kernels() -> bool:
    """Whether the workers' layers will run on the native kernels, found out without loading MindSpore."""
    return os.environ.get("KCP_BACKEND", "") in ("", "native") and KERNELS.exists()


def _kept_by_layer(model: ModelOptions, ranks: int, graph: bool, attention: str, feed_forward: str) -> float:
    """Numbers a token that a layer keeps from forward to backward."""
    hidden = model.hidden_size
    if attention == MLA:
        heads, key = model.num_attention_heads, model.qk_nope_head_dim + model.qk_rope_head_dim
        kept = 2 * hidden + heads * (2 * key + 2 * model.v_head_dim) + ranks * (model.kv_lora_rank + model.qk_rope_head_dim)
        kept += heads * model.seq_length  # weights of every query
    else:
        q, v = model.linear_num_heads * model.linear_head_dim, model.linear_num_value_heads * model.linear_value_head_dim
        gate = model.linear_num_value_heads * model.linear_head_dim
        kept = 2 * hidden + 3 * (2 * q + v) + 2 * gate + 3 * v
        if model.kda_disable_recompute:
            state = model.linear_head_dim * model.linear_value_head_dim / model.kda_chunk_size
            kept += model.linear_num_value_heads * (state + model.linear_value_head_dim + 2 * 64)
    if feed_forward == SPARSE:
        experts = model.num_experts if graph else model.num_experts_per_token
        inner = (experts + model.num_shared_experts) * model.moe_intermediate_size
        return kept + 2 * hidden + model.num_experts + 4 * inner + (4 * experts if graph else experts) * hidden
    return kept + 2 * hidden + 4 * model.intermediate_size


def available_bytes() -> int | None:
    """Memory that this machine, or the control group that the process runs in, still has; None where it can't be found out."""
    found = []
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        found += [int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")]
    except OSError:
        pass
    if not found and hasattr(os, "sysconf") and "SC_AVPHYS_PAGES" in os.sysconf_names:
        found.append(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    for limit, used in (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")):
        try:
            found.append(int(Path("/sys/fs/cgroup", limit).read_text()) - int(Path("/sys/fs/cgroup", used).read_text()))
        except (OSError, ValueError):  # no such group, or "max"
            continue
    return min(found, default=None)


def memory_of(run: RunConfig) -> int | None:
    """Memory that a run may take: what its file says, else what there is."""
    return int(run.memory.available_gib * GIB) or available_bytes()


def memory_problem(run: RunConfig, workers: int, available: int | None) -> str | None:
    """Why a run does not fit, with both figures and what would; None when it does or nothing is known.

    Args:
        run: the configuration; only runs on the CPU are judged.
        workers: how many of its workers share this machine's memory.
        available: as :func:`available_bytes` finds it.
    """
    if run.training.device_target != "CPU" or available is None:
        return None
    needed = estimate_memory(run)
    if workers * needed.total <= available:
        return None
    parts = ", ".join(f"{name} {value / GIB:.1f}" for name, value in asdict(needed).items())
    text = f"memory: {workers * needed.total / GIB:.1f} GiB are needed for {workers} worker" + ("s" if workers > 1 else "")
    text += f" (each {needed.total / GIB:.1f}: {parts}), {available / GIB:.1f} GiB are available; "
    fits = largest_batch(run, workers, available)
    if fits:
        text += f"runner_config.batch_size = {fits} fits, with gradient_accumulation_steps for the rest"
    elif _fits(replace(run, training=replace(run.training, mode=1, recompute=True)), 1, workers, available):
        text += "batch_size = 1 fits with context.mode: 1 and recompute_config.recompute: True"
    else:
        text += "lower model.model_config.seq_length or the model's sizes, or use more machines"
    return text + ". The estimate may be off by a factor of 2: {type: KcpMemory, check: False} under callbacks starts the run anyway"


def largest_batch(run: RunConfig, workers: int, available: int) -> int:
    """The largest ``batch_size`` up to the run's that fits; 0: none does."""
    first, last = 0, run.training.batch_size
    while first < last:
        middle = (first + last + 1) // 2
        first, last = (middle, last) if _fits(run, middle, workers, available) else (first, middle - 1)
    return first


def _fits(run: RunConfig, batch_size: int, workers: int, available: int) -> bool:
    return workers * estimate_memory(run, batch_size).total <= available
