"""Layouts, head groups, sizes, types and options of ``chunk_kda`` against the float64 recurrence."""

from __future__ import annotations

from dataclasses import replace

import mindspore as ms
import numpy as np
import pytest
from op_cases import assert_same_bits, check, make_problem, run, tensor_of

from kcp.ops import chunk_kda

pytestmark = pytest.mark.usefixtures("backend")


@pytest.mark.parametrize("layout", ["BSND", "BNSD", "TND", "NTD"])
def test_layouts(layout):
    batch = 2 if len(layout) == 4 else 1
    problem = make_problem(1, B=batch, T=75, Hv=4, initial_state=True, d_final=True)
    check(run(problem, layout=layout), problem.truth())


def test_layouts_give_the_same_bits():
    problem = make_problem(2, T=67)
    first = run(problem, layout="BSND")
    for layout in ("BNSD", "TND", "NTD"):
        assert_same_bits(run(problem, layout=layout), first)


@pytest.mark.parametrize("layout", ["TND", "NTD"])
def test_packed_layouts(layout):
    problem = make_problem(3, lens=(5, 64, 1, 30), initial_state=True, d_final=True)
    check(run(problem, layout=layout), problem.truth())


@pytest.mark.parametrize("Hk, Hv", [(1, 1), (1, 4), (2, 4), (2, 8), (3, 6)])
def test_head_groups(Hk, Hv):
    problem = make_problem(4, T=66, Hk=Hk, Hv=Hv, initial_state=True, d_final=True)
    check(run(problem), problem.truth())


@pytest.mark.parametrize(
    "K, V",
    [(16, 32), (32, 16), (1, 5), (3, 1), (60, 100), (100, 60), (17, 3)]
    + [pytest.param(K, V, marks=pytest.mark.ci) for K, V in [(256, 256), (256, 1), (3, 256), (128, 64), (1, 1)]],
)
def test_head_sizes(K, V):
    problem = make_problem(5, T=70, K=K, V=V, l2=K > 1, initial_state=True, d_final=True)
    check(run(problem), problem.truth())


@pytest.mark.parametrize("chunk_size", [16, 32, 64])
@pytest.mark.parametrize("T", [1, 63, 130])
def test_chunk_sizes(chunk_size, T):
    problem = make_problem(6, T=T, initial_state=True, d_final=True, chunk_size=chunk_size)
    check(run(problem), problem.truth())


@pytest.mark.parametrize("T", [2, 3, 15, 16, 17, 31, 32, 33, 64, 65] + [pytest.param(257, marks=pytest.mark.ci)])
def test_lengths(T):
    problem = make_problem(7, T=T, B=2, d_final=True)
    check(run(problem), problem.truth())


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("gate", ["lower_bound", "softplus", "none"])
def test_storage_types(dtype, gate):
    problem = make_problem(8, T=100, gate=gate, dtype=dtype, initial_state=True, d_final=True)
    check(run(problem), problem.truth(), dtype=dtype)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_types_of_results(dtype):
    """The output has the type of v, gradients that of their input, states are float32."""
    problem = make_problem(9, T=20, dtype=dtype, initial_state=True)
    values = [tensor_of(n, x, dtype=dtype) for n, x in problem.inputs.items()]

    def loss(q, k, v, g, beta, a_log, dt_bias, state):
        out, final = chunk_kda(
            q, k, v, g, beta, layout="BSND", output_final_state=True, a_log=a_log, dt_bias=dt_bias,
            initial_state=state, **problem.options,
        )  # fmt: skip
        return out.astype(ms.float32).sum() + final.sum(), out, final

    (_, out, final), grads = ms.value_and_grad(loss, tuple(range(8)), has_aux=True)(*values)
    assert (out.dtype, final.dtype) == (values[2].dtype, ms.float32)
    assert [g.dtype for g in grads] == [x.dtype for x in values]
    assert [g.shape for g in grads] == [x.shape for x in values]


def test_float32_gate_beside_bfloat16_inputs():
    problem = make_problem(10, T=40, gate="none", dtype="bfloat16")
    want = problem.truth()
    check(run(problem, gate_dtype="float32"), want, dtype="bfloat16")


GATES = {
    "lower_bound": {"gate": "lower_bound"},
    "lower_bound_without_a_log": {"gate": "lower_bound", "a_log": False},
    "lower_bound_without_bias": {"gate": "lower_bound", "dt_bias": False},
    "lower_bound_bare": {"gate": "lower_bound", "a_log": False, "dt_bias": False},
    "lower_bound_of_its_own": {"gate": "lower_bound", "lower_bound": -1.5},
    "softplus": {"gate": "softplus"},
    "softplus_without_bias": {"gate": "softplus", "dt_bias": False},
    "pre_computed": {"gate": "none"},
}


@pytest.mark.parametrize("gate", GATES)
def test_gates(gate):
    problem = make_problem(11, T=75, initial_state=True, d_final=True, **GATES[gate])
    check(run(problem), problem.truth())


@pytest.mark.parametrize("gate", ["lower_bound", "softplus", "none"])
def test_natural_exponents_give_equal_results(gate):
    problem = make_problem(12, T=75, gate=gate, initial_state=True, d_final=True)
    check(run(problem, use_exp2=False), problem.truth())


OPTIONS = {
    "raw_keys": {"l2": False},
    "beta_as_given": {"sigmoid": False},
    "raw_keys_and_beta_as_given": {"l2": False, "sigmoid": False},
    "neg_eigval": {"allow_neg_eigval": True},
    "epsilon": {"epsilon": 0.5},
    "scale": {"scale": 0.37},
    "scale_zero": {"scale": 0.0},
}


@pytest.mark.parametrize("option", OPTIONS)
def test_options(option):
    problem = make_problem(13, T=75, initial_state=True, d_final=True, **OPTIONS[option])
    check(run(problem), problem.truth())


def test_default_scale_is_one_over_root_k():
    problem = make_problem(14, T=20, K=16)
    assert_same_bits(run(problem.with_options(scale=0.25)), run(problem.with_options(scale=None)))


def test_dt_bias_as_matrix():
    problem = make_problem(15, T=30)
    matrix = replace(problem, inputs={**problem.inputs, "dt_bias": problem.inputs["dt_bias"].reshape(2, 16)})
    got, want = run(matrix), run(problem)
    assert got["dt_bias"].shape == (2, 16)
    assert np.array_equal(got["dt_bias"].reshape(-1), want["dt_bias"])


@pytest.mark.parametrize("gate", ["lower_bound", "softplus", "none"])
@pytest.mark.parametrize("packed", [False, True])
def test_recomputed_backward_equals_saved_bitwise(gate, packed):
    problem = make_problem(16, T=70, lens=(40, 0, 30) if packed else None, gate=gate, initial_state=True, d_final=True)
    assert_same_bits(run(problem, disable_recompute=False), run(problem, disable_recompute=True))


@pytest.mark.ci
@pytest.mark.parametrize(
    ("sizes", "how"),
    [
        ({"T": 1300, "Hk": 1}, {}),
        ({"T": 1040, "B": 2, "Hk": 1, "Hv": 3}, {"layout": "BNSD", "jit": True}),
        ({"lens": (513, 0, 1030, 1), "Hk": 1, "state_v_first": True}, {"cu_form": "tensor", "jit": True}),
        ({"lens": (600, 512), "Hk": 2, "Hv": 4, "dtype": "bfloat16"}, {"cu_form": "tensor"}),
    ],
    ids=["one_head", "batch", "packed", "groups"],
)
def test_a_sequence_of_many_chunks_recomputed(backend, sizes, how):
    """More chunks than a kernel treats at once (512 tokens of chunk_size 16): the oracle's values, the bits of a saved backward."""
    how = {**how, "jit": backend == "native" and how.get("jit", False)}  # composite's graphs unroll their chunks
    problem = make_problem(23, initial_state=True, d_final=True, chunk_size=16, V=24, **sizes)
    got = run(problem, disable_recompute=False, **how)
    check(got, problem.truth(), dtype=sizes.get("dtype", "float32"))
    assert_same_bits(got, run(problem, disable_recompute=True, **how))


def test_final_state_is_none_unless_asked_for():
    problem = make_problem(17, T=5)
    values = {n: tensor_of(n, x) for n, x in problem.inputs.items()}
    out, state = chunk_kda(**values, layout="BSND", **problem.options)
    assert state is None and out.shape == (1, 5, 2, 16)


def test_default_layout_is_head_major_in_token_major_out():
    problem = make_problem(18, T=6, V=8)
    values = {n: tensor_of(n, x, "BNSD") for n, x in problem.inputs.items()}
    out, _ = chunk_kda(**values, **problem.options)
    assert out.shape == (1, 6, 2, 8)
    assert np.array_equal(out.asnumpy(), run(problem)["out"])
