"""Packed sequences: boundaries as host integers and as Tensors, PyNative and graph, with and without states."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor
from op_cases import assert_same_bits, check, make_problem, run, tensor_of

from kcp.ops import chunk_kda

pytestmark = pytest.mark.usefixtures("backend")

PACKS = {
    "one": (70,),
    "tokens_alone": (1, 1, 1),
    "empty_first": (0, 40),
    "empty_last": (40, 0),
    "empty_between": (64, 0, 0, 65),
    "mixed": (1, 63, 64, 65, 7),
    "tails": (15, 17, 31, 33, 3),
}


@pytest.mark.parametrize("cu_form", ["host", "tensor"])
@pytest.mark.parametrize("pack", PACKS)
def test_packs(pack, cu_form):
    problem = make_problem(1, lens=PACKS[pack], initial_state=True, d_final=True)
    check(run(problem, cu_form=cu_form), problem.truth())


@pytest.mark.parametrize("cu_form", ["host", "tensor"])
@pytest.mark.parametrize("gate", ["softplus", "none"])
def test_gates(gate, cu_form):
    """A raw gate of 0 is not zero decay: padded rows of a chunk must be inert after the gate."""
    problem = make_problem(2, lens=(30, 0, 1, 70), gate=gate, Hv=4, V=24, initial_state=True, d_final=True)
    check(run(problem, cu_form=cu_form), problem.truth())


@pytest.mark.parametrize("cu_form", ["host", "tensor"])
def test_without_states(cu_form):
    problem = make_problem(3, lens=(20, 0, 50))
    check(run(problem, cu_form=cu_form), problem.truth())


@pytest.mark.parametrize("cu_form", ["host", "tensor"])
@pytest.mark.parametrize("chunk_size", [16, 32])
def test_chunk_sizes(chunk_size, cu_form):
    problem = make_problem(4, lens=(33, 0, 15, 16, 1), chunk_size=chunk_size, initial_state=True, d_final=True)
    check(run(problem, cu_form=cu_form), problem.truth())


@pytest.mark.ci
@pytest.mark.parametrize("cu_form", ["host", "tensor"])
def test_graph_mode(cu_form):
    problem = make_problem(5, lens=(9, 0, 20), chunk_size=16, K=8, initial_state=True, d_final=True)
    check(run(problem, cu_form=cu_form, jit=True), problem.truth())


@pytest.mark.parametrize("sequence_type", [list, tuple, "numpy"])
def test_forms_of_host_integers(sequence_type):
    problem = make_problem(6, lens=(10, 20))
    cu = problem.options["cu_seqlens"]
    cu = [np.int32(b) for b in cu] if sequence_type == "numpy" else sequence_type(cu)
    assert_same_bits(run(problem, cu_seqlens=cu), run(problem))


def test_one_sequence_equals_the_dense_call_bitwise():
    dense = make_problem(7, T=70, initial_state=True, d_final=True)
    for cu_form in ("host", "tensor"):
        assert_same_bits(run(dense.with_options(cu_seqlens=[0, 70]), cu_form=cu_form), run(dense))


def test_every_sequence_equals_itself_alone_bitwise():
    lens = (5, 64, 0, 66)
    problem = make_problem(8, lens=lens, initial_state=True, d_final=True)
    packed, start = run(problem), 0
    for n, length in enumerate(lens):
        part = slice(start, start + length)
        if length:
            alone = make_problem(8, T=length, initial_state=True, d_final=True)
            alone.inputs.update({m: problem.inputs[m][:, part] for m in ("q", "k", "v", "g", "beta")})
            alone.inputs.update({m: problem.inputs[m] for m in ("a_log", "dt_bias")})
            alone.inputs["initial_state"] = problem.inputs["initial_state"][n : n + 1]
            alone.d_out[...] = problem.d_out[:, part]
            alone.d_final_state[...] = problem.d_final_state[n : n + 1]
            got = run(alone)
            for m in ("q", "k", "v", "g", "beta", "out"):
                assert np.array_equal(packed[m][:, part], got[m]), (n, m)
            for m in ("initial_state", "final_state"):
                assert np.array_equal(packed[m][n], got[m][0]), (n, m)
        start += length


def test_chunk_indices_that_fit_are_accepted():
    """FLA's table of (sequence, chunk) pairs; it says nothing that cu_seqlens does not."""
    problem = make_problem(9, lens=(65, 0, 10))
    table = [[0, 0], [0, 1], [2, 0]]
    want = run(problem)
    assert_same_bits(run(problem, chunk_indices=[i for row in table for i in row]), want)
    assert_same_bits(run(problem, chunk_indices=Tensor(np.asarray(table, np.int32))), want)


def _compilations() -> int:
    from mindspore.graph import api

    return len(api.ms_compile_cache)


@pytest.mark.ci
def test_a_new_packing_does_not_recompile():
    problem = make_problem(10, lens=(30, 0, 40), chunk_size=16, initial_state=True)
    options = {n: x for n, x in problem.options.items() if n != "cu_seqlens"}
    values = {n: tensor_of(n, x) for n, x in problem.inputs.items()}

    @ms.jit
    def step(cu, q, k, v, g, beta, a_log, dt_bias, initial_state):
        out, state = chunk_kda(
            q, k, v, g, beta, a_log=a_log, dt_bias=dt_bias, initial_state=initial_state, cu_seqlens=cu, layout="BSND",
            output_final_state=True, **options,
        )  # fmt: skip
        return out, state

    counts, before = [], _compilations()
    for cu in ([0, 30, 30, 70], [0, 1, 69, 70], [0, 0, 0, 70], [0, 64, 70, 70]):
        out, state = step(Tensor(np.asarray(cu, np.int32)), *values.values())
        want = problem.with_options(cu_seqlens=cu).truth()
        check({"out": out.asnumpy(), "final_state": state.asnumpy()}, want)
        counts.append(_compilations())
    assert set(counts) == {before + 1}, (before, counts)
