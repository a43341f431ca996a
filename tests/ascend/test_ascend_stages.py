"""Every stage and the op through the emulated kernels, against the float64 recurrence."""

from __future__ import annotations

import emulator
import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor
from op_cases import errors, make_problem, relative, run
from stage_chain import Chain

from kcp import ops as kcp_ops
from kcp.ops import backends
from kcp.ops.backends import ascend

pytestmark = pytest.mark.usefixtures("emulated")

BF16 = 1e-2  # every tensor's relative L2 error; rounding to bfloat16 alone is 0.17 %, peers' kernels are at 0.3 to 1 %


def bf16_problem(seed: int = 1, **changes):
    return make_problem(seed, **{"T": 70, "Hk": 2, "K": 128, "dtype": "bfloat16", **changes})


def within(found: dict[str, float], limit: float = BF16) -> None:
    bad = {name: error for name, error in found.items() if not error <= limit}
    assert not bad, bad


OPS = {
    "states": ({"initial_state": True, "d_final": True}, set(ascend.CHAIN)),
    "recompute_v_first": ({"initial_state": True, "d_final": True, "disable_recompute": False, "state_v_first": True}, {"bwd_finalize"}),
    "grouped_batch": ({"Hv": 4, "B": 2, "d_final": True}, {"bwd_finalize"}),
    "packed_with_an_empty_sequence": ({"lens": (5, 0, 64, 66), "initial_state": True, "d_final": True}, {"bwd_finalize"}),
    "without_parameters": ({"a_log": False, "dt_bias": False}, {"bwd_finalize"}),
    "raw_keys_and_beta": ({"l2": False, "sigmoid": False}, {"bwd_finalize"}),
    "neg_eigval": ({"allow_neg_eigval": True, "d_final": True}, {"bwd_finalize"}),
    "natural_exponents": ({"use_exp2": False}, {"bwd_finalize"}),
    "pre_computed_gate": ({"gate": "none", "initial_state": True}, {"fwd_prepare", "bwd_dhu"}),
    "softplus_with_a_state": ({"gate": "softplus", "initial_state": True, "d_final": True}, {"fwd_prepare", "bwd_dhu"}),
}


@pytest.mark.parametrize("case", OPS)
def test_the_op(case):
    changes, used = OPS[case]
    problem = bf16_problem(**changes)
    entering = 0.0 if problem.d_final_state is None else float(np.linalg.norm(problem.d_final_state))
    found = errors(run(problem), problem.truth(), entering)
    assert used <= set(emulator.calls) and "chunk_kda" not in emulator.calls
    within(found)


@pytest.mark.parametrize("layout", ["BNSD", "NTD", "TND"])
def test_layouts(layout):
    problem = bf16_problem(2, T=66, initial_state=True)
    within(errors(run(problem, layout=layout), problem.truth()))


def test_boundaries_in_a_tensor():
    problem = bf16_problem(3, lens=(3, 64, 1), initial_state=True, d_final=True)
    within(errors(run(problem, cu_form="tensor"), problem.truth(), entering=float(np.linalg.norm(problem.d_final_state))))


@pytest.mark.parametrize("lens", [None, (5, 64, 1)], ids=["dense", "packed"])
def test_the_fused_op(lens):
    """A softplus gate without states goes to npu_chunk_kda alone, with its own gradient."""
    problem = bf16_problem(4, Hv=4, gate="softplus", lens=lens)
    got, _ = _without_final_state(problem)
    assert set(emulator.calls) <= {"chunk_kda", "bwd_prepare", "bwd_dhu"}  # the last two are inside its backward
    truth = problem.truth()
    within(errors(got, {name: truth[name] for name in got} | {"a_log_terms": truth["a_log_terms"]}))


def _without_final_state(problem):
    names = list(problem.inputs)
    tensors = [Tensor(x).astype(ms.bfloat16) if n in ("q", "k", "v", "g", "beta") else Tensor(x) for n, x in problem.inputs.items()]
    d_out = Tensor(problem.d_out)

    def loss(*values):
        out, state = kcp_ops.chunk_kda(**dict(zip(names, values, strict=True)), layout="BSND", **problem.options)
        return (out.astype(ms.float32) * d_out).sum(), out, state if state is not None else out

    (_, out, _), grads = ms.value_and_grad(loss, tuple(range(len(names))), has_aux=True)(*tensors)
    return {**{n: g.astype(ms.float32).asnumpy() for n, g in zip(names, grads, strict=True)}, "out": out.astype(ms.float32).asnumpy()}, out


CHAINS = {
    "states": {"initial_state": True, "d_final": True},
    "natural_v_first": {"initial_state": True, "d_final": True, "state_v_first": True},
    "grouped_batch": {"Hv": 4, "B": 2, "d_final": True},
    "packed": {"lens": (5, 0, 64, 66), "initial_state": True, "d_final": True},
}


@pytest.mark.parametrize("case", CHAINS)
def test_the_explicit_stages(case):
    """The public stages, one after the other as a caller would: float32 caches with bfloat16 values."""
    problem = bf16_problem(5, **CHAINS[case])
    chain = Chain(problem, use_exp2=case != "natural_v_first")
    found = errors(chain.run(), problem.truth(), entering=float(np.linalg.norm(problem.d_final_state)))
    assert set(ascend.CHAIN) <= set(emulator.calls)
    within(found)
    caches = chain.prepare()
    assert all(x.dtype == ms.float32 for x in caches.values())
    rounded = caches["w"].astype(ms.bfloat16).astype(ms.float32)
    assert np.array_equal(rounded.asnumpy(), caches["w"].asnumpy())


@pytest.mark.parametrize("changes", [{"B": 2}, {"lens": (5, 0, 64, 66)}, {"Hv": 4}], ids=["batch", "packed", "grouped"])
def test_summaries(changes):
    """Both summary stages against the affine maps that composite makes in float32 of the same caches, under slow decay."""
    problem = bf16_problem(6, **{"T": 130, "shift": -9.0, "d_final": True, **changes})
    chain = Chain(problem)
    c = chain.prepare()
    h, v_new, _ = chain.states(c, None)
    _, dv_local, _ = chain.local(c, v_new, h)
    got = chain.summary(c).asnumpy(), chain.back_summary(c, dv_local).asnumpy()
    assert "pre_process_fwd" in emulator.calls and "pre_process_bwd" in emulator.calls
    with backends.use("composite"):
        want = chain.summary(c).asnumpy(), chain.back_summary(c, dv_local).asnumpy()
    for name, x, y in zip(("forward", "backward"), got, want, strict=True):
        for part in (np.s_[..., :128], np.s_[..., 128:]):
            assert relative(x[part], y[part]) <= 3e-3, name


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize(
    ("count", "rank", "forward"), [(0, 0, True), (1, 1, True), (3, 3, True), (0, 3, False), (1, 2, False), (2, 1, False)]
)
def test_merge(count, rank, forward, v_first):
    """The merge kernel launches for one rank or more, whatever the old state holds."""
    rng = np.random.default_rng(7)
    summaries = (0.1 * rng.standard_normal((4, 2, 2, 128, 256))).astype(np.float32)
    state = Tensor(rng.standard_normal((2, 2, 128, 128)).astype(np.float32))
    got = kcp_ops.chunk_kda_merge_fwd_bwd(state, Tensor(summaries), count, rank, forward=forward, state_v_first=v_first).asnumpy()
    assert ("merge_fwd_bwd" in emulator.calls) == (count > 0)
    want = np.zeros((2, 2, 128, 128))
    for r in range(rank - count, rank) if forward else range(rank + count, rank, -1):
        want = summaries[r].astype(np.float64)[..., 128:] @ want + summaries[r][..., :128]
    want = np.swapaxes(want, -1, -2) if v_first else want
    assert np.allclose(got, want, rtol=0, atol=1e-5 * max(1.0, np.abs(want).max()))


def test_graphs_are_left_to_other_backends():
    """Compiled code never holds Hyper-Parallel's functions."""
    problem = bf16_problem(8, T=5)
    within(errors(run(problem, jit=True), problem.truth()))
    assert emulator.calls == []
