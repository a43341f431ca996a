"""Sizes at which counters, grids and indices of other implementations end."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor
from op_cases import check, make_problem, relative, run

from kcp.ops import backends, chunk_kda
from kcp.ops.reference import kda_reference


def test_96_heads(backend):
    problem = make_problem(20, T=33, Hk=32, Hv=96, K=16, V=8, initial_state=True, d_final=True, chunk_size=16)
    check(run(problem), problem.truth())


@pytest.mark.parametrize("width", [60, 100])
def test_widths_that_are_no_power_of_two(backend, width):
    problem = make_problem(21, T=70, K=width, initial_state=True, d_final=True, dtype="float32")
    check(run(problem), problem.truth())


@pytest.mark.parametrize("cu_form", ["host", pytest.param("tensor", marks=pytest.mark.ci)])
def test_1100_chunks_in_one_pack(backend, cu_form):
    """Short and long sequences, empty ones among them, until there are 1,100 chunks."""
    rng = np.random.default_rng(22)
    lens: list[int] = []
    while sum(-(-length // 16) for length in lens) < 1100:
        lens.append(int(rng.choice([0, 1, 15, 16, 17, 40, 200])))
    problem = make_problem(22, lens=tuple(lens), Hk=1, K=4, initial_state=True, d_final=True, chunk_size=16)
    check(run(problem, cu_form=cu_form), problem.truth())


def test_more_rows_and_heads_than_16_bits_count():
    """B H = 66,000, more than the 65,535 blocks that the second axis of a GPU's grid has."""
    problem = make_problem(23, B=33_000, T=2, Hk=1, Hv=2, K=2, initial_state=True, d_final=True, chunk_size=16)
    with backends.use("native"):
        check(run(problem), problem.truth())


@pytest.mark.once
@pytest.mark.parametrize("layout", ["BNSD", "BSND"])
def test_a_gate_of_more_than_2_to_the_31_elements(layout):
    """g alone, 4.3 GB of bfloat16, one key head for 8,193 value heads of width 1; the first, a middle and the last head, all tokens."""
    from mindspore.common.np_dtype import bfloat16

    T, H, K = 1025, 8193, 256
    rng = np.random.default_rng(24)
    bits = (np.float32(-rng.uniform(0.001, 0.2, 1 << 24)).view(np.uint32) >> 16).astype(np.uint16)
    g = np.empty((1, H, T, K) if layout == "BNSD" else (1, T, H, K), np.uint16)
    assert g.size > 2**31
    parts = g.reshape(-1, T * K) if layout == "BNSD" else g.reshape(-1, H * K)
    for number, part in enumerate(parts):
        begin = number * 9973 % (bits.size - part.size)
        part[:] = bits[begin : begin + part.size]
    heads = [0, H // 2, H - 1]
    chosen = g[:, heads].swapaxes(1, 2) if layout == "BNSD" else g[:, :, heads]
    small = {"q": (1, T, 1, K), "k": (1, T, 1, K), "v": (1, T, H, 1), "beta": (1, T, H)}
    arrays = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in small.items()}
    options = {"safe_gate": False, "use_gate_in_kernel": False, "use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
    tensors, exact = {}, {}
    for name, x in arrays.items():
        stored = (x.view(np.uint32) >> 16).astype(np.uint16)
        exact[name] = (stored.astype(np.uint32) << 16).view(np.float32)
        stored = stored if layout == "BSND" else stored.swapaxes(1, 2)
        tensors[name] = Tensor(np.ascontiguousarray(stored).view(bfloat16))
    exact["g"] = (np.ascontiguousarray(chosen).astype(np.uint32) << 16).view(np.float32)
    for name in ("v", "beta"):
        exact[name] = exact[name][:, :, heads]
    tensors["g"] = Tensor(g.view(bfloat16))
    del g, parts, part, chosen
    with backends.use("native"):
        order = (tensors[name] for name in ("q", "k", "v", "g", "beta"))
        out, state = chunk_kda(*order, layout=layout, output_final_state=True, disable_recompute=False, **options)
    truth = kda_reference(**{name: exact[name] for name in ("q", "k", "v", "g", "beta")}, **options)
    got = out.astype(ms.float32).asnumpy()[:, :, heads]
    assert relative(got, truth.out) <= 2.0**-8 + 1e-5
    assert relative(state.asnumpy()[:, heads], truth.final_state) <= 1e-5
