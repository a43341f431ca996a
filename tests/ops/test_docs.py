"""docs/ops.md against the code: its table of arguments and results, its other tables, and its examples."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass

import mindspore as ms
import numpy as np
import pytest
from docs_page import CONTRACT, PAGE, Row, function_of, table
from golden_cases import ROOT
from mindspore import Tensor

from kcp import ops as kcp_ops

DTYPES = {"float32": ms.float32, "float16": ms.float16, "bfloat16": ms.bfloat16}
STORAGE = "float32, float16 or bfloat16"


# ---- names, order, defaults


def test_the_table_has_every_public_function_and_nothing_else():
    assert sorted(function_of(stage).__name__ for stage in CONTRACT) == sorted(kcp_ops.__all__)


@pytest.mark.parametrize("stage", CONTRACT)
def test_arguments_in_order_with_their_defaults(stage):
    parameters = inspect.signature(function_of(stage)).parameters
    assert list(CONTRACT[stage].arguments) == list(parameters)
    for name, row in CONTRACT[stage].arguments.items():
        default = parameters[name].default
        assert row.default == ("required" if default is inspect.Parameter.empty else f"`{default!r}`"), name
        if row.default != "required" and default is not None:
            assert row.dtype == type(default).__name__, name
    assert {row.default for row in CONTRACT[stage].results.values()} == {"—"}


@pytest.mark.parametrize("stage", CONTRACT)
def test_the_docstring_speaks_of_every_argument(stage):
    text = inspect.getdoc(function_of(stage))
    arguments = text.split("Args:")[1].split("Returns:")[0]
    assert [name for name in CONTRACT[stage].arguments if not re.search(rf"\b{name}\b", arguments)] == []
    assert "Returns:" in text and "Raises:" in text and "Source:" in text


# ---- shapes and dtypes, in real calls

DENSE = {"B": 2, "Hk": 3, "Hv": 6, "T": 70, "K": 9, "V": 8, "C": 16, "Nc": 5, "N": 2, "S": 4}
PACKED = {"B": 1, "Hk": 3, "Hv": 6, "T": 70, "K": 9, "V": 8, "C": 16, "Nc": 7, "N": 4, "S": 12}
BOUNDARIES = [0, 49, 49, 67, 70]
ORDERS = {"BNSD": "B H T D", "BSND": "B T H D", "NTD": "H T D", "TND": "T H D"}


def test_the_sizes_tell_the_axes_apart():
    for sizes in (DENSE, PACKED):
        values = [n for name, n in sizes.items() if sizes is PACKED or name != "N"] + [sizes["V"] + sizes["K"]]
        assert len(set(values)) == len(values)


def size_of(axis: str, sizes: dict[str, int]) -> int:
    """``V+K``, ``Hv*K``, ``N+1`` or one name."""
    left, operator, right = re.fullmatch(r"(\w+)(?:([+*])(\w+))?", axis).groups()
    if operator is None:
        return sizes[left]
    a, b = sizes[left], int(right) if right.isdigit() else sizes[right]
    return a + b if operator == "+" else a * b


def axes_of(shape: str, stage: str, name: str, case: Case) -> list[str]:
    """Axis names of one alternative of a row, in the layout and state order of the case."""
    axes = shape.rstrip("†").strip("[]").replace("{K,V}", "V,K" if case.v_first else "K,V").split(",")
    if not shape.endswith("†") or case.layout == default_layout(stage):
        return axes
    layout = case.layout
    if (stage, name) == ("chunk_kda", "out"):
        layout = "TND" if layout in ("NTD", "TND") else "BSND"
    head = next(axis for axis in axes if axis.startswith("H"))
    named = {"B": ["B"], "H": [head], "T": ["T"], "D": [axis for axis in axes if axis not in ("B", head, "T")]}
    return [axis for place in ORDERS[layout].split() for axis in named[place]]


def default_layout(stage: str) -> str | None:
    parameters = inspect.signature(function_of(stage)).parameters
    return next((parameters[name].default for name in ("layout", "output_layout") if name in parameters), None)


def shapes_of(row: Row, stage: str, case: Case) -> list[tuple[int, ...]]:
    ways = [axes_of(shape, stage, row.name, case) for shape in row.shape.split(" or ")]
    return [tuple(size_of(axis, case.sizes) for axis in axes) for axes in ways]


def dtypes_of(row: Row, case: Case) -> list:
    """Dtypes that the row allows."""
    text = row.dtype.removesuffix(" or None")
    if text == STORAGE:
        return list(DTYPES.values())
    if text in ("as q", "as v"):
        return [DTYPES[case.dtype]]
    return [{"float32": ms.float32, "ints, or int32": ms.int32}[text]]


# Which tensor each argument of a stage takes: a cache of an earlier stage, or an input of the problem.
SCAN = {"q": "qg", "k": "kg", "w": "w", "d_o": "d_o", "dv": "dv_local", "gk": "gk"}
TENSORS = {
    "chunk_kda": {n: n for n in ("q", "k", "v", "g", "beta", "a_log", "dt_bias", "initial_state")},
    "fwd_prepare": {n: n for n in ("q", "k", "v", "g", "beta", "a_log", "dt_bias")},
    "pre_process_fwd": {"k": "kg", "w": "w", "u": "u", "gk": "gk"},
    "fwd_h": {"k": "kg", "w": "w", "u": "u", "gk": "gk", "initial_state": "initial_state"},
    "fwd_finalize": {"qg_scaled": "qg_scaled", "aqk": "Aqk", "v_new": "v_new", "h": "h"},
    "bwd_prepare": {"aqk": "Aqk", "v_new": "v_new", "d_o": "d_out", "h": "h"},
    "pre_process_bwd": SCAN,
    "bwd_dhu": {**SCAN, "h0": "initial_state", "dht": "initial_state"},
    "bwd_finalize": {
        "q": "q_hat", "k": "k_hat", "v": "v_head_major", "gk": "gk", "raw_g": "g_head_major", "beta": "beta_head_major",
        "a_log": "a_log", "dt_bias": "dt_bias", "akk": "Akk", "v_new": "v_new", "h": "h", "dh": "dh", "dv_scan": "dv_scan",
        "d_aqk": "dAqk", "dq_raw": "dq_raw", "q_rstd": "q_rstd", "k_rstd": "k_rstd",
    },
    "merge_fwd_bwd": {"state": "initial_state", "summaries": "summaries"},
}  # fmt: skip
FLAGS = {"safe_gate": True, "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "use_qk_l2norm_in_kernel": True}


@dataclass
class Case:
    """One way to call all the stages; ``bare`` leaves out every optional tensor, the norm and the optional caches."""

    packed: bool = False
    layout: str = "BNSD"
    v_first: bool = False
    dtype: str = "float32"
    boundaries: str = "ints"
    flat_bias: bool = True
    bare: bool = False

    def __post_init__(self):
        self.sizes = PACKED if self.packed else DENSE
        B, Hk, Hv, T, K, V, _, _, N, S = self.sizes.values()
        rng = np.random.default_rng(0)

        def normal(*shape, dtype="float32"):
            return Tensor(rng.standard_normal(shape), ms.float32).astype(DTYPES[dtype])

        def tokens(head, *width, dtype=self.dtype):
            order = {"B": (B,), "H": (head,), "T": (T,), "D": width}
            return normal(*sum((order[place] for place in ORDERS[self.layout].split()), ()), dtype=dtype)

        state = (N, Hv, V, K) if self.v_first else (N, Hv, K, V)
        self.pool = {
            "q": tokens(Hk, K), "k": tokens(Hk, K), "v": tokens(Hv, V), "g": tokens(Hv, K), "d_out": tokens(Hv, V),
            "beta": tokens(Hv),
            "a_log": normal(Hv), "dt_bias": normal(Hv * K) if self.flat_bias else normal(Hv, K),
            "v_head_major": normal(B, Hv, T, V, dtype=self.dtype), "g_head_major": normal(B, Hv, T, K, dtype=self.dtype),
            "beta_head_major": normal(B, Hv, T, dtype=self.dtype), "d_o": normal(B, Hv, T, V, dtype=self.dtype),
            "initial_state": normal(*state), "summaries": normal(S, N, Hv, K, V + K),
        }  # fmt: skip

    def arguments(self, stage: str) -> dict:
        """Arguments of a legal call, by name."""
        parameters = inspect.signature(function_of(stage)).parameters
        given = {argument: self.pool.get(source) for argument, source in TENSORS[stage].items()}
        given |= {name: value for name, value in FLAGS.items() if name in parameters}
        if self.bare:
            given = {n: x for n, x in given.items() if parameters[n].default is inspect.Parameter.empty or n == "safe_gate"}
            given |= {n: None for n in ("a_log", "dt_bias") if n in given}
        if self.bare and stage == "merge_fwd_bwd":
            given = {"state": given["state"][0], "summaries": given["summaries"][:, 0]}
        options = {
            "chunk_size": self.sizes["C"], "layout": self.layout, "output_layout": self.layout, "state_v_first": self.v_first,
            "output_final_state": not self.bare, "backward_mode": "none" if self.bare else "save",
            "pre_or_post_num_ranks": 2, "rank": 3,
        }  # fmt: skip
        if self.packed:
            options["cu_seqlens"] = BOUNDARIES if self.boundaries == "ints" else Tensor(np.array(BOUNDARIES, np.int32))
        return given | {name: value for name, value in options.items() if name in parameters}

    def call(self, stage: str) -> dict[str, Tensor | None]:
        """The stage's results by the names of the table, all checked against it; kept for the stages that follow."""
        arguments = self.arguments(stage)
        for name, value in arguments.items():
            if isinstance(value, Tensor):
                self.check(stage, CONTRACT[stage].arguments[name], value)
        results = function_of(stage)(**arguments)
        results = results if isinstance(results, tuple) else (results,)
        rows = CONTRACT[stage].results
        assert len(results) == len(rows), stage
        for row, value in zip(rows.values(), results, strict=True):
            assert (value is None) == (self.bare and row.dtype.endswith(" or None")), f"{stage}: {row.name} is {value}"
            if value is not None:
                self.check(stage, row, value)
        return dict(zip(rows, results, strict=True))

    def check(self, stage: str, row: Row, value: Tensor) -> None:
        assert tuple(value.shape) in shapes_of(row, stage, self), f"{stage}: {row.name} {value.shape}, not {row.shape}"
        assert value.dtype in dtypes_of(row, self), f"{stage}: {row.name} {value.dtype}, not {row.dtype}"

    def run(self) -> None:
        """Every stage in order; caches that a bare call does not return are added for the stages that follow."""
        for stage in CONTRACT:
            results = self.call(stage)
            if self.bare and stage == "fwd_prepare":
                complete = kcp_ops.chunk_kda_fwd_prepare(**{**self.arguments(stage), "backward_mode": "save"})
                results = dict(zip(results, complete, strict=True))
            self.pool.update({n: x for n, x in results.items() if x is not None})


CASES = {
    "dense": Case,
    "dense_token_major": lambda: Case(layout="BSND", dtype="bfloat16"),
    "dense_v_first": lambda: Case(v_first=True, flat_bias=False, dtype="float16"),
    "packed": lambda: Case(packed=True),
    "packed_v_first": lambda: Case(packed=True, v_first=True, layout="BSND", boundaries="int32"),
    "packed_tokens_first": lambda: Case(packed=True, layout="TND", dtype="bfloat16", v_first=True),
    "packed_heads_first": lambda: Case(packed=True, layout="NTD", boundaries="int32", flat_bias=False),
    "bare": lambda: Case(bare=True),
    "bare_packed": lambda: Case(packed=True, bare=True, v_first=True),
}


@pytest.mark.parametrize("case", CASES)
def test_shapes_and_dtypes_of_real_calls(case):
    CASES[case]().run()


def test_chunks_of_a_graph_with_boundaries_in_a_tensor():
    """The upper bound of the page, and the exact count in PyNative."""
    (formula,) = re.findall(r"max\(1, min\(\(T \+ .*?, T\)\)", PAGE)
    case = Case(packed=True, boundaries="int32")
    case.run()
    arguments = {n: case.arguments("fwd_h")[n] for n in ("k", "w", "u", "gk", "chunk_size", "cu_seqlens")}
    assert kcp_ops.chunk_kda_fwd_h(**arguments)[0].shape[1] == PACKED["Nc"]

    @ms.jit
    def in_graph(k, w, u, gk, cu):
        return kcp_ops.chunk_kda_fwd_h(k, w, u, gk=gk, chunk_size=16, cu_seqlens=cu)[0]

    h = in_graph(*(arguments[n] for n in ("k", "w", "u", "gk", "cu_seqlens")))
    assert h.shape[1] == eval(formula, {}, {**PACKED, "max": max, "min": min}) > PACKED["Nc"]


def changed(x: Tensor, axis: int) -> Tensor:
    """``x`` with one more entry along an axis."""
    return ms.ops.concat((x, x[(slice(None),) * axis + (slice(0, 1),)]), axis)


@pytest.mark.parametrize("stage", CONTRACT)
@pytest.mark.parametrize("packed", [False, True])
def test_shapes_of_the_table_are_asked_for(stage, packed):
    """One more entry along any axis of any tensor argument is refused, unless no other argument shares that size."""
    case = Case(packed=packed)
    case.run()
    legal = case.arguments(stage)
    used = {}
    for name in TENSORS[stage]:
        ways = [axes_of(shape, stage, name, case) for shape in CONTRACT[stage].arguments[name].shape.split(" or ")]
        (used[name],) = (axes for axes in ways if len(axes) == legal[name].ndim)
    for name, axes in used.items():
        for i, axis in enumerate(axes):
            others = [other for n, a in used.items() if n != name for other in a if axis in re.split(r"[+*]", other)]
            if others or axis in ("C", "Nc"):
                with pytest.raises(ValueError, match="allowed: "):
                    function_of(stage)(**{**legal, name: changed(legal[name], i)})


@pytest.mark.parametrize("stage", CONTRACT)
def test_dtypes_of_the_table_are_what_is_accepted(stage):
    case = Case()
    case.run()
    legal = case.arguments(stage)
    for name in TENSORS[stage]:
        for dtype in (*DTYPES.values(), ms.int32, ms.float64):
            changes = {name: legal[name].astype(dtype)}
            allowed = dtypes_of(CONTRACT[stage].arguments[name], case)
            if name == "q" and CONTRACT[stage].arguments["k"].dtype == "as q":
                changes |= {n: legal[n].astype(dtype) for n in ("k", "v")}
            if dtype in allowed:
                function_of(stage)(**{**legal, **changes})
            else:
                with pytest.raises(TypeError, match=f"^{name} has dtype"):
                    function_of(stage)(**{**legal, **changes})


# ---- the other tables


def words(cell: str) -> set[str]:
    return {word.strip() for word in cell.split(",")} - {"nothing"}


CACHES = list(CONTRACT["fwd_prepare"].results)
NEEDED = {"gk", "Aqk", "Akk", "w", "qg", "kg", "q_hat", "k_hat", "q_rstd", "k_rstd"}  # by the backward stages, see test_reads


def test_backward_modes():
    case = Case()
    arguments = case.arguments("fwd_prepare")
    rows = table("backward_mode", "slots", "caches", "enough for", "missing for the backward stages")
    assert {row[0] for row in rows} == {"`none`", "`forward`", "`recompute`", "`save`"}
    for mode, slots, caches, _, missing in rows:
        results = kcp_ops.chunk_kda_fwd_prepare(**{**arguments, "backward_mode": mode.strip("`")})
        got = [i for i, x in enumerate(results) if x is not None]
        assert got == (list(range(13)) if slots == "0 to 12" else [int(slot) for slot in slots.split(",")]), mode
        assert [CACHES[i] for i in got] == (CACHES if caches == "all" else [name.strip() for name in caches.split(",")]), mode
        assert words(missing) == NEEDED - {CACHES[i] for i in got}, mode


def test_reads():
    """The second table of the section is what the calls of this file pass."""
    inputs = {"initial_state", "d_o", "d_out", "v_head_major", "g_head_major", "beta_head_major", "a_log", "dt_bias"}
    rows = table("stage", "reads of `fwd_prepare`", "reads of later stages")
    assert [row[0] for row in rows] == [stage for stage in CONTRACT if stage not in ("chunk_kda", "fwd_prepare", "merge_fwd_bwd")]
    for stage, caches, others in rows:
        passed = set(TENSORS[stage].values()) - inputs
        assert words(caches) == passed & set(CACHES), stage
        assert words(others) == passed - set(CACHES), stage
    backward = [words(row[1]) for row in rows if "bwd" in row[0]]
    assert set().union(*backward) == NEEDED


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_caches_can_be_recomputed_from_the_normalised_inputs(dtype):
    case = Case(dtype=dtype)
    arguments = case.arguments("fwd_prepare")
    first = dict(zip(CACHES, kcp_ops.chunk_kda_fwd_prepare(**arguments), strict=True))
    kept = dict(zip(CACHES, kcp_ops.chunk_kda_fwd_prepare(**{**arguments, "backward_mode": "recompute"}), strict=True))
    again = kcp_ops.chunk_kda_fwd_prepare(**{
        **arguments, "q": kept["q_hat"], "k": kept["k_hat"], "beta": kept["beta_eff"], "v": arguments["v"].astype(ms.float32),
        "use_qk_l2norm_in_kernel": False, "use_beta_sigmoid_in_kernel": False,
    })  # fmt: skip
    for name, value in zip(CACHES[:8], again[:8], strict=True):
        assert np.array_equal(value.asnumpy(), first[name].asnumpy()), name


def test_symbols_are_where_the_table_says():
    rows = table("symbol", "meaning", "file: name")
    assert len(rows) > 20
    for symbol, _, place in rows:
        path, name = re.fullmatch(r"`([\w/.]+)`: `(\w+)`", place).groups()
        assert re.search(rf"\b{name}\b", (ROOT / path).read_text(encoding="utf-8")), f"{symbol}: no {name} in {path}"


def test_migration_speaks_of_arguments_that_exist():
    """Every `name=value` on kcp's side of the FLA table is a legal keyword of chunk_kda."""
    parameters = inspect.signature(kcp_ops.chunk_kda).parameters
    for _, ours, _ in table("FLA", "kcp", "remarks"):
        for keyword in re.findall(r"(\w+)=", ours):
            assert keyword in parameters, keyword


# ---- the examples

EXAMPLES = re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.M | re.S)


def test_there_are_two_examples():
    assert len(EXAMPLES) == 2


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_example_runs(number):
    exec(compile(EXAMPLES[number], f"docs/ops.md, example {number + 1}", "exec"), {"__name__": "example"})


def test_pictures_exist():
    for path in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", PAGE):
        assert (ROOT / "docs" / path).is_file(), path
