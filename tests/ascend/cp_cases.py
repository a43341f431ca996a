"""KdaCore over ranks in bfloat16 through the emulated kernels, run in lockstep or under msrun, against the float64 recurrence."""

from __future__ import annotations

from dataclasses import dataclass

import mindspore as ms
import numpy as np
from core_cases import INPUTS, TOKEN_INPUTS, CoreProblem
from emulated_storage import stored
from mindspore import ops

from kcp.layers import KdaCore
from kcp.ops.options import describe


@dataclass(frozen=True)
class Bf16Core(CoreProblem):
    """A :class:`CoreProblem` of the kernels' sizes, token tensors in bfloat16."""

    batch: int = 1
    num_v_heads: int = 2
    head_dim: int = 128
    v_head_dim: int = 128

    def config(self, strategy=None):
        options = {"chunk_size": 64, **self.options}
        return CoreProblem(**{**self._fields(), "options": options}).config(strategy or self.strategy)

    def _fields(self) -> dict:
        return {name: getattr(self, name) for name in CoreProblem.__dataclass_fields__}

    def arrays(self):
        x = super().arrays()
        return {name: stored(v) if name in (*TOKEN_INPUTS, "d_out") else v for name, v in x.items()}

    def rank_tensors(self, rank):
        t = super().rank_tensors(rank)
        return {name: x.astype(ms.bfloat16) if name in (*TOKEN_INPUTS, "d_out") else x for name, x in t.items()}


def _numpy(named: dict) -> dict[str, np.ndarray]:
    return {name: x.astype(ms.float32).asnumpy() for name, x in named.items()}


def run_rank(problem: Bf16Core, group) -> dict[str, np.ndarray]:
    """One rank through the strategy's explicit forward and backward."""
    t = problem.rank_tensors(group.rank)
    core = KdaCore(problem.config(), group)
    state = t["initial_state"] if problem.with_initial_state else None
    tensors = [t[name] for name in INPUTS[:-1]] + [state]
    cell = core.strategy_cell(tuple(describe(x) for x in tensors), problem.cu_seqlens, None, problem.with_final_state)
    inputs = tensors[:-1] + [ops.zeros((1,), ms.float32) if state is None else state, ops.zeros((1,), ms.float32)]
    results = cell.construct(*inputs)
    grads = cell.bprop(*inputs, results, (t["d_out"], t["d_final"] if problem.with_final_state else None))
    return _numpy({"out": results[0], "final_state": results[1], **dict(zip(INPUTS, grads[:8], strict=True))})


def run_autodiff(problem: Bf16Core, group) -> dict[str, np.ndarray]:
    """The same through ``ms.grad`` in PyNative, for processes under msrun."""
    t = problem.rank_tensors(group.rank)
    core = KdaCore(problem.config(), group)

    def loss(*values):
        named = dict(zip(INPUTS, values, strict=True))
        state = named["initial_state"] if problem.with_initial_state else None
        out, final_state = core(*(named[n] for n in INPUTS[:-1]), state, problem.cu_seqlens, output_final_state=problem.with_final_state)
        total = (out.astype(ms.float32) * t["d_out"].astype(ms.float32)).sum()
        if problem.with_final_state:
            total = total + (final_state * t["d_final"]).sum()
        return total, out, out if final_state is None else final_state

    (_, out, final_state), grads = ms.value_and_grad(loss, tuple(range(8)), has_aux=True)(*(t[name] for name in INPUTS))
    return _numpy({"out": out, "final_state": final_state, **dict(zip(INPUTS, grads, strict=True))})


def distances(problem: Bf16Core, ranks: list[dict[str, np.ndarray]]) -> dict[str, float]:
    """Relative L2 error of every result, put together from the ranks; a_log against the sum of its absolute terms."""
    truth = problem.truth()
    got = {n: np.concatenate([r[n] for r in ranks], 1) for n in ("out", *TOKEN_INPUTS)}
    got |= {n: sum(r[n] for r in ranks) for n in ("a_log", "dt_bias")}
    if problem.with_final_state:
        got["final_state"] = ranks[-1]["final_state"]
    if problem.with_initial_state:
        got["initial_state"] = ranks[0]["initial_state"]
    found = {}
    for name, x in got.items():
        size = np.linalg.norm(truth["a_log_terms" if name == "a_log" else name])
        found[name] = float(np.linalg.norm(x.astype(np.float64) - truth[name]) / max(size, 1e-30))
    return found
