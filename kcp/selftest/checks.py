"""What the self-test checks on one device: peers' golden results, the stages, ranks in lockstep, the precision gate, timings.

Each function returns rows; a row with a limit passes where its value does not exceed it. Expected values are a float64 recurrence over
tokens (:mod:`kcp.ops.reference`), stored results of a peer, or the same call on one rank; never the code under test.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import Tensor

from kcp import ops as kcp_ops
from kcp.ops import backends
from kcp.ops.reference import kda_reference_grad

STORED = ("q", "k", "v", "g", "beta")
GOLDEN = "fla_kda_seed1"
PEER_SHARE = 0.6  # of the peer's own error, on the CPU
BF16_LIMIT = 0.02  # of a tensor whose caches the kernels store in bfloat16


@dataclass(frozen=True)
class Row:
    """One finding.

    Attributes:
        name: what was looked at.
        value: a relative error, or milliseconds.
        limit: what it may be; None: for information.
        note: which tensor, which backend, ...
    """

    name: str
    value: float
    limit: float | None = None
    note: str = ""

    @property
    def passed(self) -> bool:
        """Whether the value is finite and within its limit."""
        return bool(np.isfinite(self.value)) and (self.limit is None or self.value <= self.limit)


@dataclass(frozen=True)
class Call:
    """Inputs (BSND, float32 arrays that ``dtype`` can hold), options and output gradients of one call."""

    inputs: dict[str, np.ndarray]
    options: dict
    d_out: np.ndarray | None
    d_final: np.ndarray | None
    dtype: str = "bfloat16"
    gate_dtype: str = "bfloat16"

    def truth(self) -> dict[str, np.ndarray]:
        """Outputs and gradients of the float64 recurrence."""
        options = {n: x for n, x in self.options.items() if n not in ("disable_recompute", "chunk_size")}
        return kda_reference_grad(**self.inputs, **options, d_out=self.d_out, d_final_state=self.d_final)

    def tensors(self) -> dict[str, Tensor]:
        """The inputs on the device."""
        kinds = {**dict.fromkeys(STORED, getattr(ms, self.dtype)), "g": getattr(ms, self.gate_dtype)}
        return {n: Tensor(x.astype(np.float32)).astype(kinds[n]) if n in STORED else Tensor(x) for n, x in self.inputs.items()}


def rounded(x: np.ndarray) -> np.ndarray:
    """float32 values that bfloat16 can hold (round to nearest even)."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def random_call(seed: int, tokens: int, heads: int = 2, width: int = 128, safe_gate: bool = True, shift: float = -2.0, **kinds) -> Call:
    """A random call; ``kinds``: ``initial_state``, ``d_final``, ``d_out`` (default True) and options of the op."""
    rng = np.random.default_rng(seed)
    kinds = {"initial_state": False, "d_final": False, "d_out": True, **kinds}
    token, state = (1, tokens, heads, width), (1, heads, width, width)
    inputs = {n: rounded(rng.standard_normal(token)) for n in ("q", "k", "v")}
    inputs["g"] = rounded(shift + rng.standard_normal(token))
    inputs["beta"] = rounded(rng.standard_normal(token[:3]))
    inputs["a_log"] = rng.uniform(-1.0, 0.5, heads).astype(np.float32)
    inputs["dt_bias"] = (0.3 * rng.standard_normal(heads * width)).astype(np.float32)
    if kinds.pop("initial_state"):
        inputs["initial_state"] = rng.standard_normal(state).astype(np.float32)
    d_final = rng.standard_normal(state).astype(np.float32) if kinds.pop("d_final") else None
    d_out = rounded(rng.standard_normal(token)) if kinds.pop("d_out") else None
    options = {"safe_gate": safe_gate, "use_gate_in_kernel": True, "use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
    return Call(inputs, {**options, **kinds}, d_out, d_final)


def run_op(call: Call, output_final_state: bool = True) -> dict[str, np.ndarray]:
    """Outputs and gradients of ``chunk_kda`` in PyNative."""
    tensors = call.tensors()
    names = list(tensors)
    d_out = None if call.d_out is None else Tensor(call.d_out.astype(np.float32))
    d_final = None if call.d_final is None else Tensor(call.d_final)

    def loss(*values):
        named = dict(zip(names, values, strict=True))
        out, final = kcp_ops.chunk_kda(**named, layout="BSND", output_final_state=output_final_state, **call.options)
        total = 0.0
        if d_out is not None:
            total = total + (out.astype(ms.float32) * d_out).sum()
        if d_final is not None:
            total = total + (final * d_final).sum()
        return total, out, out if final is None else final

    (_, out, final), grads = ms.value_and_grad(loss, tuple(range(len(names))), has_aux=True)(*tensors.values())
    found = {"out": out, **dict(zip(names, grads, strict=True))} | ({"final_state": final} if output_final_state else {})
    return {name: x.astype(ms.float32).asnumpy() for name, x in found.items()}


def relative(got: np.ndarray, want: np.ndarray, size: np.ndarray | None = None) -> float:
    """Relative L2 error, of ``size`` where the expected value can vanish."""
    norm = float(np.linalg.norm(np.asarray(want if size is None else size, np.float64)))
    return float(np.linalg.norm(np.asarray(got, np.float64) - want)) / max(norm, 1e-30)


def errors(got: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> dict[str, float]:
    """Error of every tensor; a_log's is a sum that can cancel, and counts by its absolute terms."""
    return {n: relative(x, want[n].reshape(x.shape), want.get("a_log_terms") if n == "a_log" else None) for n, x in got.items()}


def worst(name: str, found: dict[str, float], limit: float, note: str = "") -> Row:
    """The row of the largest error."""
    tensor = max(found, key=lambda n: found[n] if np.isfinite(found[n]) else np.inf)
    return Row(name, found[tensor], limit, f"{tensor}{', ' if note else ''}{note}")


def _server(stage: str = "chunk_kda") -> str:
    return backends.select(stage).__name__.rsplit(".", 1)[-1]


# ---- golden results of a peer


def golden_calls(folder: Path) -> Iterator[tuple[str, Call, dict, dict]]:
    """``(case, call, float64 truth, the peer's own errors)`` of every case in ``folder``."""
    table = json.loads((folder / f"{GOLDEN}.json").read_text())
    peer = json.loads((folder / f"{GOLDEN}_fla_error.json").read_text())
    with np.load(folder / f"{GOLDEN}.npz") as store, np.load(folder / f"{GOLDEN}_truth.npz") as truths:
        for case, meta in table.items():
            x = {n.split("/", 1)[1]: _float(store[n]) for n in store.files if n.startswith(f"{case}/")}
            want = {n.split("/", 1)[1]: truths[n] for n in truths.files if n.startswith(f"{case}/")}
            options = {"use_gate_in_kernel": False, **meta["kwargs"]}
            if "lens" in meta["opts"]:
                options["cu_seqlens"] = [0, *np.cumsum(meta["opts"]["lens"]).tolist()]
            inputs = {_name(n): x[n] for n in (*STORED, "A_log", "dt_bias", "initial_state") if n in x}
            d_out, d_final = None if meta["opts"].get("nodo") else x["do"], x["dht"] if meta["opts"].get("dht") else None
            call = Call(inputs, options, d_out, d_final, gate_dtype="bfloat16" if "g" in meta["bf16_as_uint16"] else "float32")
            yield case, call, {_name(n): t for n, t in want.items()}, {_name(n): e for n, e in peer[case].items()}


def _name(name: str) -> str:
    name = name.removeprefix("grad_")
    return "a_log" if name == "A_log" else name


def _float(x: np.ndarray) -> np.ndarray:
    return (x.astype(np.uint32) << 16).view(np.float32) if x.dtype == np.uint16 else x


def goldens(folder: Path, device: str) -> list[Row]:
    """Every golden case; on the CPU against the peer's own error, on an NPU against what bfloat16 caches allow."""
    rows = []
    for case, call, want, peer in golden_calls(folder):
        exact = call.truth()
        found = errors(run_op(call), {**exact, **{n: t.reshape(exact[n].shape) for n, t in want.items() if n in exact}})
        found = {n: e for n, e in found.items() if float(np.abs(exact[n]).max()) > 1e-6}  # where the truth is 0 there is no relative error
        if device == "CPU":
            limits = {n: PEER_SHARE * peer[n] if peer.get(n) and n != "a_log" else 1e-5 for n in found}
            shares = {n: e / limits[n] for n, e in found.items()}
            rows.append(worst(f"golden {case}", shares, 1.0, "in units of its limit"))
        else:
            rows.append(worst(f"golden {case}", found, BF16_LIMIT))
    return rows


# ---- the stages


def stages() -> list[Row]:
    """The op by its routes, and the nine stages by hand, against the float64 recurrence."""
    plain = random_call(1, 70, safe_gate=False)
    states = random_call(2, 130, initial_state=True, d_final=True)
    recompute = random_call(3, 130, initial_state=True, d_final=True, disable_recompute=False)
    rows = [
        worst("op, softplus gate, no states", errors(run_op(plain, False), plain.truth()), BF16_LIMIT, f"{_server()}, the fused route"),
        worst("op, softplus gate, final state", errors(run_op(plain), plain.truth()), BF16_LIMIT, f"{_server()}, the chain of stages"),
        worst("op, lower-bound gate, states", errors(run_op(states), states.truth()), BF16_LIMIT, _server()),
        worst("op, recomputed backward", errors(run_op(recompute), recompute.truth()), BF16_LIMIT, _server()),
    ]
    return [*rows, *_by_hand(states)]


def _by_hand(call: Call) -> list[Row]:
    """The explicit stages, one after the other, head-major."""
    t = {n: x.swapaxes(1, 2) if n in STORED else x for n, x in call.tensors().items()}
    gate = {"safe_gate": True, "use_gate_in_kernel": True}
    beta = {"use_beta_sigmoid_in_kernel": True}
    scale = call.inputs["q"].shape[-1] ** -0.5
    d_o, dht = Tensor(call.d_out).astype(ms.bfloat16).swapaxes(1, 2), Tensor(call.d_final)
    c = kcp_ops.chunk_kda_fwd_prepare(
        *(t[n] for n in STORED), scale, a_log=t["a_log"], dt_bias=t["dt_bias"], use_qk_l2norm_in_kernel=True, **gate, **beta
    )
    gk, aqk, akk, w, u, qg, kg, qg_scaled, q_hat, k_hat, q_rstd, k_rstd, _ = c
    h, v_new, final = kcp_ops.chunk_kda_fwd_h(kg, w, u, gk=gk, initial_state=t["initial_state"], output_final_state=True)
    out = kcp_ops.chunk_kda_fwd_finalize(qg_scaled, aqk, v_new, h)
    d_aqk, dv_local, dq_raw = kcp_ops.chunk_kda_bwd_prepare(aqk, v_new, d_o, h, scale=scale)
    dh, dh0, scan = kcp_ops.chunk_kda_bwd_dhu(qg, kg, w, d_o, dv_local, scale, gk=gk, h0=t["initial_state"], dht=dht)
    grads = kcp_ops.chunk_kda_bwd_finalize(
        q_hat, k_hat, t["v"], gk, t["g"], t["beta"], t["a_log"], t["dt_bias"], akk, v_new, h, dh, scan, d_aqk, dq_raw, scale=scale,
        q_rstd=q_rstd, k_rstd=k_rstd, output_layout="BSND", **gate, **beta,
    )  # fmt: skip
    got = dict(zip(("q", "k", "v", "beta", "g", "a_log", "dt_bias"), grads, strict=True))
    got |= {"out": out, "final_state": final, "initial_state": dh0}
    got = {n: x.astype(ms.float32).asnumpy() for n, x in got.items()}
    rows = [worst("stages by hand", errors(got, call.truth()), BF16_LIMIT, _server("fwd_h"))]
    summary = kcp_ops.chunk_kda_pre_process_fwd(kg, w, u, gk=gk, cu_seqlens=[0, kg.shape[2]])[0].asnumpy()
    back = kcp_ops.chunk_kda_pre_process_bwd(qg, kg, w, d_o, dv_local, scale, gk=gk).asnumpy()
    width = summary.shape[-2]
    predicted = summary[..., width:] @ call.inputs["initial_state"] + summary[..., :width]
    rows.append(Row("forward summary", relative(predicted, final.asnumpy()), 0.01, f"against fwd_h, {_server('pre_process_fwd')}"))
    predicted = back[..., width:] @ call.d_final + back[..., :width]
    rows.append(Row("backward summary", relative(predicted, dh0.asnumpy()), 0.01, f"against bwd_dhu, {_server('pre_process_bwd')}"))
    state, two = Tensor(np.zeros(summary.shape[1:3] + (width,), np.float32)), np.stack([summary[0], 2.0 * summary[0]])
    merged = kcp_ops.chunk_kda_merge_fwd_bwd(state, Tensor(np.concatenate([two, two[:1]])), 2, 2).asnumpy()
    want = two[1][..., width:] @ two[0][..., :width] + two[1][..., :width]
    return [*rows, Row("merge", relative(merged, want), 1e-4, _server("merge_fwd_bwd"))]


# ---- ranks in lockstep, the precision gate, timings


def lockstep_ranks(device: str) -> list[Row]:
    """Every strategy over 2, 4 and 8 ranks of this process against one rank."""
    from kcp.parallel.simulate import core_errors

    dtype, width, limit = (ms.float32, 32, 5e-5) if device == "CPU" else (ms.bfloat16, 128, BF16_LIMIT)
    rows = []
    for ranks in (2, 4, 8):
        for strategy in ("ulysses", "state_scan", "ptp_chain", "ptp_tree", "hybrid"):
            found = core_errors(strategy, ranks, 24 * ranks + 5, heads=8, width=width, dtype=dtype, seed=ranks)
            rows.append(worst(f"{strategy}, {ranks} ranks in lockstep", found, limit, "against one rank"))
    return rows


def precision_gate(seeds: int) -> list[Row]:
    """Section 8.2 of the Hyper-Parallel document: strong decay, bfloat16, T = 65, constant dht, the final state alone in the loss."""
    found = []
    for seed in range(seeds):
        call = random_call(seed, 65, heads=1, shift=1.0, initial_state=True, d_final=True, d_out=False)
        call.d_final[...] = 1.0
        call.inputs["a_log"][...] = 0.0
        want = call.truth()["k"]
        same_sign = Call({**call.inputs, "v": np.abs(call.inputs["v"])}, call.options, None, call.d_final)
        size = max(np.linalg.norm(want), 1e-3 * np.linalg.norm(same_sign.truth()["k"]))  # dk itself can cancel to nothing
        found.append(float(np.linalg.norm(run_op(call)["k"] - want) / size))
    return [Row(f"precision gate, {seeds} seeds", max(found), 0.01, f"dk of seed {int(np.argmax(found))}, {_server()}")]


def _wait() -> None:
    """Until the device is done; the CPU runs synchronously here."""
    if ms.get_context("device_target") != "CPU":
        ms.runtime.synchronize()


def timings(tokens: int, heads: int, repeats: int = 5) -> list[Row]:
    """Milliseconds of a forward and of forward + backward, medians."""
    call = random_call(0, tokens, heads)
    tensors, rows = call.tensors(), []
    names = list(tensors)

    def forward(*values):
        return kcp_ops.chunk_kda(**dict(zip(names, values, strict=True)), layout="BSND", **call.options)[0]

    def loss(*values):
        return forward(*values).astype(ms.float32).sum()

    both = ms.grad(loss, tuple(range(len(names))))
    for what, function in (("forward", forward), ("forward + backward", both)):
        seconds = []
        for _ in range(repeats + 1):
            _wait()
            start = time.perf_counter()
            function(*tensors.values())
            _wait()
            seconds.append(time.perf_counter() - start)
        rows.append(Row(f"{what}, T {tokens}, {heads} heads of 128", 1e3 * statistics.median(seconds[1:]), None, f"ms, {_server()}"))
    return rows
