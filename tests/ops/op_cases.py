"""Random problems for the op, one way to run it, and the comparison with the float64 recurrence.

Everything here is NumPy in layout BSND; :func:`run` moves it to the layout, dtype and boundary form under test.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import mindspore as ms
import numpy as np
from golden_cases import golden_case
from mindspore import Tensor

from kcp.ops import chunk_kda
from kcp.ops.reference import kda_reference_grad

DTYPES = {"float32": ms.float32, "float16": ms.float16, "bfloat16": ms.bfloat16}
TENSORS = ("q", "k", "v", "g", "beta", "a_log", "dt_bias", "initial_state")
STORED = ("q", "k", "v", "g", "beta")
TO_LAYOUT = {
    "BSND": lambda x: x,
    "BNSD": lambda x: np.swapaxes(x, 1, 2),
    "TND": lambda x: x[0],
    "NTD": lambda x: np.swapaxes(x, 1, 2)[0],
}
FROM_LAYOUT = {**TO_LAYOUT, "TND": lambda x: x[None], "NTD": lambda x: np.swapaxes(x, 0, 1)[None]}
# Largest relative error of rounding one number to the type, and the smallest step of its subnormals.
ROUNDING = {"float32": (0.0, 0.0), "float16": (2.0**-11, 2.0**-25), "bfloat16": (2.0**-8, 0.0)}


@dataclass(frozen=True)
class Problem:
    """Inputs (BSND, float32 values exactly representable in ``dtype``), options of the op, and output gradients."""

    inputs: dict[str, np.ndarray]
    options: dict = field(default_factory=dict)
    d_out: np.ndarray | None = None
    d_final_state: np.ndarray | None = None
    dtype: str = "float32"

    def truth(self) -> dict[str, np.ndarray]:
        """Outputs and gradients of the float64 recurrence."""
        ignored = ("chunk_size", "disable_recompute", "use_exp2", "chunk_indices")
        options = {n: x for n, x in self.options.items() if n not in ignored}
        return kda_reference_grad(**self.inputs, **options, d_out=self.d_out, d_final_state=self.d_final_state)

    def with_options(self, **options) -> Problem:
        return replace(self, options={**self.options, **options})


def rounded(x: np.ndarray, dtype: str) -> np.ndarray:
    """``x`` as float32 rounded to what ``dtype`` can hold."""
    x = np.asarray(x, dtype=np.float32)
    if dtype == "float16":
        return x.astype(np.float16).astype(np.float32)
    if dtype == "bfloat16":
        bits = x.view(np.uint32).astype(np.uint64)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        return bits.astype(np.uint32).view(np.float32)
    return x


def make_problem(
    seed: int = 0,
    *,
    B: int = 1,
    T: int = 70,
    Hk: int = 2,
    Hv: int | None = None,
    K: int = 16,
    V: int | None = None,
    gate: str = "lower_bound",
    a_log: bool = True,
    dt_bias: bool = True,
    l2: bool = True,
    sigmoid: bool = True,
    lens: tuple[int, ...] | None = None,
    initial_state: bool = False,
    d_final: bool = False,
    d_out: bool = True,
    shift: float = -2.0,
    dtype: str = "float32",
    **options,
) -> Problem:
    """A random problem.

    Args:
        seed: Seed of all its numbers.
        gate: ``lower_bound``, ``softplus`` or ``none`` (then ``g`` is a log decay).
        lens: Lengths of packed sequences; their sum replaces T.
        shift: Mean of the raw gate: -2 keeps states alive for tens of tokens, so that errors in them are seen.
        options: Further options of the op, taken as they are.
    """
    rng = np.random.default_rng(seed)
    Hv, V = Hv or Hk, V or K
    if lens is not None:
        T = sum(lens)
        options["cu_seqlens"] = [0, *np.cumsum(lens).tolist()]
    N = B if lens is None else len(lens)

    def normal(*shape: int, to: str = dtype) -> np.ndarray:
        return rounded(rng.standard_normal(shape), to)

    raw = shift + rng.standard_normal((B, T, Hv, K))
    beta = rng.standard_normal((B, T, Hv))
    unit = 1.0 if l2 else K**-0.5
    inputs = {
        "q": rounded(unit * normal(B, T, Hk, K), dtype),
        "k": rounded(unit * normal(B, T, Hk, K), dtype),
        "v": normal(B, T, Hv, V),
        "g": rounded(-np.logaddexp(0.0, raw) if gate == "none" else raw, dtype),
        "beta": rounded(beta if sigmoid else 1.0 / (1.0 + np.exp(-beta)), dtype),
    }
    if not l2:
        # beta |k|^2 <= 2 keeps the recurrence stable; longer keys let the state grow without bound
        length = np.linalg.norm(inputs["k"], axis=-1, keepdims=True)
        inputs["k"] = rounded(inputs["k"] / np.maximum(length, 1.0), dtype)
    if gate != "none" and a_log:
        inputs["a_log"] = rng.uniform(-1.0, 0.5, Hv).astype(np.float32)
    if gate != "none" and dt_bias:
        inputs["dt_bias"] = (0.3 * rng.standard_normal(Hv * K)).astype(np.float32)
    state_shape = (N, Hv, V, K) if options.get("state_v_first") else (N, Hv, K, V)
    if initial_state:
        inputs["initial_state"] = normal(*state_shape, to="float32")
    options.update(safe_gate=gate == "lower_bound", use_gate_in_kernel=gate != "none")
    options.update(use_qk_l2norm_in_kernel=l2, use_beta_sigmoid_in_kernel=sigmoid)
    return Problem(
        inputs,
        options,
        normal(B, T, Hv, V) if d_out else None,
        normal(*state_shape, to="float32") if d_final else None,
        dtype,
    )


def golden_problem(case: str) -> tuple[Problem, dict[str, np.ndarray], dict[str, float]]:
    """A peer's case (inputs in bfloat16), its float64 truth and the peer's own error, under the names of the oracle."""
    meta, store, truth, peer = golden_case("fla_kda_seed1", case)

    def name_of(name: str) -> str:
        name = name.removeprefix("grad_")
        return "a_log" if name == "A_log" else name

    options = {"use_gate_in_kernel": False, **meta["kwargs"]}
    if "lens" in meta["opts"]:
        options["cu_seqlens"] = [0, *np.cumsum(meta["opts"]["lens"]).tolist()]
    inputs = {name_of(n): store[n] for n in ("q", "k", "v", "g", "beta")}
    inputs.update({name_of(n): store[n] for n in ("A_log", "dt_bias", "initial_state") if n in store})
    d_out = None if meta["opts"].get("nodo") else store["do"]
    d_final = store["dht"] if meta["opts"].get("dht") else None
    problem = Problem(inputs, options, d_out, d_final, "bfloat16")
    return problem, {name_of(n): x for n, x in truth.items()}, {name_of(n): e for n, e in peer.items()}


def tensor_of(name: str, x: np.ndarray, layout: str = "BSND", dtype: str = "float32") -> Tensor:
    """Input ``name`` as the op takes it; parameters and states stay float32."""
    if name not in STORED:
        return Tensor(np.ascontiguousarray(x, dtype=np.float32))
    return Tensor(np.ascontiguousarray(TO_LAYOUT[layout](x), dtype=np.float32)).astype(DTYPES[dtype])


def boundaries(cu_seqlens, form: str, T: int, padding: int = 2):
    """``cu_seqlens`` as host integers (``host``) or as an int32 Tensor padded with T (``tensor``)."""
    if cu_seqlens is None or form == "host":
        return cu_seqlens
    return Tensor(np.asarray(list(cu_seqlens) + [T] * padding, dtype=np.int32))


def to_numpy(x: Tensor) -> np.ndarray:
    return x.astype(ms.float32).asnumpy()


def run(
    problem: Problem,
    *,
    layout: str = "BSND",
    cu_form: str = "host",
    jit: bool = False,
    gate_dtype: str | None = None,
    tensors: dict[str, Tensor] | None = None,
    **options,
) -> dict[str, np.ndarray]:
    """Outputs and gradients of the op, as float32 NumPy in layout BSND under the names of the oracle.

    Args:
        problem: What to run.
        layout: Layout of the inputs.
        cu_form: Form of the boundaries, ``host`` or ``tensor``; the latter pads with two sequences without tokens.
        jit: Run inside ``ms.jit``.
        gate_dtype: Type of ``g`` where it differs from the problem's.
        tensors: Replacements for inputs, already in layout and dtype.
        options: Replacements for options of the op.
    """
    options = {**problem.options, "layout": layout, "output_final_state": True, **options}
    T = problem.inputs["q"].shape[1]
    names = [n for n in TENSORS if n in problem.inputs]
    types = {n: problem.dtype for n in STORED} | ({"g": gate_dtype} if gate_dtype else {})
    values = {n: tensor_of(n, problem.inputs[n], layout, types.get(n, "float32")) for n in names}
    values.update(tensors or {})
    padding = 0
    cu = options.pop("cu_seqlens", None)
    if cu is not None and cu_form == "tensor":
        padding = 2
        cu = boundaries(cu, cu_form, T, padding)
    state_shape = None
    if padding and "initial_state" in values:
        extra = np.zeros((padding, *problem.inputs["initial_state"].shape[1:]), np.float32)
        values["initial_state"] = Tensor(np.concatenate([problem.inputs["initial_state"], extra]))
        state_shape = problem.inputs["initial_state"].shape[0]
    d_out = None if problem.d_out is None else Tensor(np.ascontiguousarray(out_layout(problem.d_out, layout)))
    d_state = problem.d_final_state
    if d_state is not None:
        d_state = Tensor(np.concatenate([d_state, np.zeros((padding, *d_state.shape[1:]), np.float32)]))

    def loss(cu, q, k, v, g, beta, a_log, dt_bias, initial_state):
        out, state = chunk_kda(q, k, v, g, beta, a_log=a_log, dt_bias=dt_bias, initial_state=initial_state, cu_seqlens=cu, **options)
        value = 0.0
        if d_out is not None:
            value = value + (out.astype(ms.float32) * d_out).sum()
        if d_state is not None:
            value = value + (state * d_state).sum()
        return value, out, state

    positions = tuple(1 + TENSORS.index(n) for n in names)
    function = ms.value_and_grad(loss, grad_position=positions, has_aux=True)
    if jit:
        function = ms.jit(function)
    (_, out, state), grads = function(cu, *(values.get(n) for n in TENSORS))
    result = {n: to_numpy(g) for n, g in zip(names, grads, strict=True)}
    for name in STORED:
        result[name] = FROM_LAYOUT[layout](result[name])
    result["out"] = to_numpy(out)[None] if layout in ("TND", "NTD") else to_numpy(out)
    result["final_state"] = to_numpy(state)
    if padding:
        result["final_state"] = result["final_state"][:-padding]
        if state_shape is not None:
            result["initial_state"] = result["initial_state"][:state_shape]
    return result


def out_layout(x: np.ndarray, layout: str) -> np.ndarray:
    """A BSND array in the token-major layout that the op returns for inputs in ``layout``."""
    return x[0] if layout in ("TND", "NTD") else x


def relative(got: np.ndarray, want: np.ndarray) -> float:
    """Relative L2 error."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return float(np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-300))


def errors(got: dict[str, np.ndarray], want: dict[str, np.ndarray], entering: float = 0.0) -> dict[str, float]:
    """Error of every tensor: relative L2; that of a_log against the sum of its absolute terms.

    The initial state's gradient is what is left of the final state's after every token's contraction: where less than a hundredth of
    ``entering``, the norm of the final state's gradient, is left, its error is judged against that hundredth.

    A truth that is 0 (or below 1e-6 everywhere) counts by its largest absolute error, in units of 0.1, so that 1e-5
    of it is the 1e-6 that such a tensor may be off.
    """
    table = {}
    for name, x in got.items():
        truth = want[name]
        assert x.shape == truth.shape, f"{name}: {x.shape}, not {truth.shape}"
        assert np.all(np.isfinite(x)), f"{name} is not finite"
        if name == "a_log":
            table[name] = float(np.max(np.abs(x - truth) / np.maximum(want["a_log_terms"], 1e-1)))
        elif np.max(np.abs(truth), initial=0.0) <= 1e-6:
            table[name] = float(np.max(np.abs(x - truth), initial=0.0)) * 10.0
        elif name == "initial_state":
            size = max(float(np.linalg.norm(truth)), 0.01 * entering)
            table[name] = float(np.linalg.norm(x - truth)) / size
        else:
            table[name] = relative(x, truth)
    return table


def check(
    got: dict[str, np.ndarray],
    want: dict[str, np.ndarray],
    dtype: str = "float32",
    out_tol: float = 1e-5,
    grad_tol: float = 5e-5,
    entering: float = 0.0,
) -> dict[str, float]:
    """Hold every tensor to its tolerance: float32's, plus the rounding of results that are stored in ``dtype``."""
    found = errors(got, want, entering)
    rounding, step = ROUNDING[dtype]
    bad = {}
    for name, error in found.items():
        limit = out_tol if name in ("out", "final_state", "a_log") else grad_tol
        if name in STORED or name == "out":
            size = np.linalg.norm(want[name]) if np.max(np.abs(want[name]), initial=0.0) > 1e-6 else 0.1
            limit += rounding + step * np.sqrt(want[name].size) / size
        if not error <= limit:
            bad[name] = f"{error:.3g} > {limit:.3g}"
    assert not bad, bad
    return found


def assert_same_bits(got: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> None:
    """Bitwise equality of two results."""
    for name in want:
        assert np.array_equal(got[name], want[name]), f"{name} differs by up to {np.max(np.abs(got[name] - want[name]))}"
