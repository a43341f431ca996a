"""The nine stages: signatures, caches, the chain against the op, summaries, and no gradient through them."""

from __future__ import annotations

import inspect

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor
from op_cases import assert_same_bits, check, make_problem, relative, run
from stage_chain import PREPARE_NAMES, Chain

from kcp import ops as kcp_ops

pytestmark = pytest.mark.usefixtures("backend")

# Sections 4 and 5 of the Hyper-Parallel document, without npu_; "*" begins what is passed by keyword.
SIGNATURES = {
    "chunk_kda": "q k v g beta scale=None chunk_size=64 * layout='BNSD' output_final_state=False safe_gate=False "
    "lower_bound=-5.0 use_gate_in_kernel=True a_log=None dt_bias=None cu_seqlens=None chunk_indices=None "
    "initial_state=None disable_recompute=True state_v_first=False epsilon=1e-06 use_qk_l2norm_in_kernel=False "
    "use_beta_sigmoid_in_kernel=False allow_neg_eigval=False use_exp2=True",
    "chunk_kda_fwd_prepare": "q k v g beta scale chunk_size=64 * layout='BNSD' a_log=None dt_bias=None cu_seqlens=None "
    "chunk_indices=None epsilon=1e-06 use_qk_l2norm_in_kernel=False use_gate_in_kernel=False "
    "use_beta_sigmoid_in_kernel=False allow_neg_eigval=False safe_gate=False lower_bound=-5.0 use_exp2=True "
    "backward_mode='save'",
    "chunk_kda_pre_process_fwd": "k w u * gk cu_seqlens chunk_size=64",
    "chunk_kda_fwd_h": "k w u * gk initial_state=None output_final_state=False chunk_size=64 cu_seqlens=None "
    "chunk_indices=None use_exp2=True state_v_first=False",
    "chunk_kda_fwd_finalize": "qg_scaled aqk v_new h * output_layout='BSND' state_v_first=False cu_seqlens=None chunk_indices=None",
    "chunk_kda_bwd_prepare": "aqk v_new d_o h * scale layout='BNSD' chunk_size=64 state_v_first=False cu_seqlens=None chunk_indices=None",
    "chunk_kda_pre_process_bwd": "q k w d_o dv scale chunk_size=64 * gk cu_seqlens=None",
    "chunk_kda_bwd_dhu": "q k w d_o dv scale chunk_size=64 * gk h0=None dht=None cu_seqlens=None chunk_indices=None "
    "use_exp2=True state_v_first=False",
    "chunk_kda_bwd_finalize": "q k v gk raw_g beta a_log dt_bias akk v_new h dh dv_scan d_aqk dq_raw * scale "
    "lower_bound=-5.0 chunk_size=64 safe_gate=True use_gate_in_kernel=True use_exp2=True state_v_first=False "
    "q_rstd=None k_rstd=None cu_seqlens=None chunk_indices=None use_beta_sigmoid_in_kernel=False "
    "allow_neg_eigval=False output_layout='BNSD'",
    "chunk_kda_merge_fwd_bwd": "state summaries pre_or_post_num_ranks rank * forward=True state_v_first=False",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature_is_the_documents(name):
    """Names, order and defaults; kcp may add arguments by keyword, and defaults where the document has none."""
    parameters = inspect.signature(getattr(kcp_ops, name)).parameters
    positional, keyword = (part.split() for part in SIGNATURES[name].split("*"))
    got = [n for n, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert got == [word.split("=")[0] for word in positional]
    for word in positional + keyword:
        argument, _, default = word.partition("=")
        assert argument in parameters, argument
        if default:
            assert repr(parameters[argument].default) == default, argument
    assert not any(p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) for p in parameters.values())


CHAINS = {
    "lower_bound": {},
    "softplus": {"gate": "softplus"},
    "pre_computed": {"gate": "none"},
    "without_parameters": {"a_log": False, "dt_bias": False},
    "raw_keys_and_beta": {"l2": False, "sigmoid": False},
    "neg_eigval": {"allow_neg_eigval": True},
    "grouped": {"Hv": 4, "K": 24, "V": 8},
    "v_first": {"state_v_first": True, "V": 24},
    "batch": {"B": 2},
    "chunks_of_16": {"chunk_size": 16},
    "packed": {"lens": (5, 0, 64, 66)},
    "packed_v_first": {"lens": (5, 0, 64, 66), "state_v_first": True, "V": 8},
    "bfloat16": {"dtype": "bfloat16"},
}


@pytest.mark.ci
@pytest.mark.parametrize("variant", CHAINS)
def test_chain_equals_the_op(variant, backend):
    """The op's bits on composite; within 1e-6 where the op is fused.

    Gradients of a_log and dt_bias are sums over tokens that can cancel: they are judged against the sums of the absolute terms.
    """
    problem = make_problem(1, **{"T": 70, "initial_state": True, "d_final": True, **CHAINS[variant]})
    got, want, truth = Chain(problem).run(), run(problem), problem.truth()
    if backend == "composite":
        assert_same_bits(got, want)
    else:
        for name in want:
            size = np.linalg.norm(want[name])
            if name == "a_log":
                size = np.linalg.norm(truth["a_log_terms"])
            elif name == "dt_bias":
                size = np.linalg.norm(np.abs(truth["g"]).sum((0, 1)))
            difference = np.linalg.norm(got[name].astype(np.float64) - want[name])
            assert difference <= (1e-6 if problem.dtype == "float32" else 4e-3) * size, name
    check(got, truth, dtype=problem.dtype)


def test_chain_with_boundaries_in_a_tensor():
    problem = make_problem(2, lens=(5, 0, 64, 66), initial_state=True, d_final=True)
    check(Chain(problem, cu_form="tensor").run(), problem.truth())


def test_chain_with_natural_exponents():
    problem = make_problem(3, T=70, initial_state=True, d_final=True)
    check(Chain(problem, use_exp2=False).run(), problem.truth())


@pytest.mark.parametrize("v_first", [False, True])
def test_chain_with_the_default_scale(v_first):
    """K^-1/2 in every stage that takes a scale, the backward summary included; T, K, V, B and Hv all differ."""
    problem = make_problem(9, B=2, T=70, Hk=3, Hv=6, K=24, V=8, initial_state=True, d_final=True, state_v_first=v_first)
    chain, given = Chain(problem, default_scale=True), Chain(problem)
    assert "scale" not in problem.options
    check(chain.run(), problem.truth())
    c = given.prepare()
    h, v_new, _ = given.states(c, None)
    _, dv_local, _ = given.local(c, v_new, h)
    assert np.array_equal(chain.back_summary(c, dv_local).asnumpy(), given.back_summary(c, dv_local).asnumpy())


def test_gk_is_the_chunk_local_sum_of_the_log_decay():
    problem = make_problem(4, T=70, gate="none")
    a = np.swapaxes(problem.inputs["g"], 1, 2).astype(np.float64)
    sums = np.concatenate([np.cumsum(a[:, :, :64], 2), np.cumsum(a[:, :, 64:], 2)], 2)
    assert relative(Chain(problem, use_exp2=False).prepare()["gk"].asnumpy(), sums) <= 1e-6
    assert relative(Chain(problem).prepare()["gk"].asnumpy(), sums / np.log(2.0)) <= 1e-6


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_caches_are_float32_in_the_shapes_of_the_contract(dtype):
    B, T, Hk, Hv, K, V, C = 2, 70, 2, 4, 12, 20, 32
    problem = make_problem(5, B=B, T=T, Hk=Hk, Hv=Hv, K=K, V=V, chunk_size=C, dtype=dtype)
    chain = Chain(problem)
    c = chain.prepare()
    shapes = {
        "gk": (B, Hv, T, K), "aqk": (B, Hv, T, C), "akk": (B, Hv, T, C), "w": (B, Hv, T, K), "u": (B, Hv, T, V),
        "qg": (B, Hv, T, K), "kg": (B, Hv, T, K), "qg_scaled": (B, Hv, T, K), "q_hat": (B, Hk, T, K),
        "k_hat": (B, Hk, T, K), "q_rstd": (B, Hk, T), "k_rstd": (B, Hk, T), "beta_eff": (B, Hv, T),
    }  # fmt: skip
    h, v_new, final_state = chain.states(c, None)
    d_aqk, dv_local, dq_raw = chain.local(c, v_new, h)
    dh, dh0, dv_scan = chain.state_gradients(c, dv_local, None, None)
    assert dh0 is None
    c |= {"h": h, "v_new": v_new, "final_state": final_state, "d_aqk": d_aqk, "dv_local": dv_local, "dq_raw": dq_raw}
    c |= {"dh": dh, "dv_scan": dv_scan, "summary": chain.summary(c), "back": chain.back_summary(c, dv_local)}
    shapes |= {
        "h": (B, 3, Hv, K, V), "v_new": (B, Hv, T, V), "final_state": (B, Hv, K, V), "d_aqk": (B, Hv, T, C),
        "dv_local": (B, Hv, T, V), "dq_raw": (B, Hv, T, K), "dh": (B, 3, Hv, K, V), "dv_scan": (B, Hv, T, V),
        "summary": (B, Hv, K, V + K), "back": (B, Hv, K, V + K),
    }  # fmt: skip
    for name, shape in shapes.items():
        assert (tuple(c[name].shape), c[name].dtype) == (shape, ms.float32), name


MODES = {
    "none": {0, 1, 3, 4, 6, 7},
    "forward": {0, 1, 2, 3, 4, 6, 7},
    "recompute": {0, 1, 3, 4, 6, 7, 8, 9, 10, 11, 12},
    "save": set(range(13)),
}


@pytest.mark.parametrize("mode", MODES)
def test_backward_mode_table(mode):
    chain = Chain(make_problem(6, T=20))
    full, got = chain.prepare(), chain.prepare(mode)
    assert {i for i, n in enumerate(PREPARE_NAMES) if got[n] is not None} == MODES[mode]
    for name, x in got.items():
        assert x is None or np.array_equal(x.asnumpy(), full[name].asnumpy()), name


@pytest.mark.parametrize("lens", [None, (5, 0, 64, 66)])
@pytest.mark.parametrize("gate", ["lower_bound", "none"])
def test_summaries_are_the_affine_maps_of_the_states(gate, lens):
    """H_out = M H_in + E for random H_in, forward and backward; the oracle gives the states, too."""
    problem = make_problem(7, T=70, K=12, V=20, lens=lens, gate=gate, initial_state=True, d_final=True, shift=-4.0)
    chain = Chain(problem)
    c, V = chain.prepare(), 20
    h0, dht = problem.inputs["initial_state"], problem.d_final_state
    summary = chain.summary(c).asnumpy().astype(np.float64)
    predicted = summary[..., V:] @ h0 + summary[..., :V]
    h, v_new, final_state = chain.states(c, Tensor(h0))
    want = problem.truth()
    assert relative(final_state.asnumpy(), predicted) <= 1e-5
    assert relative(predicted, want["final_state"]) <= 1e-5
    _, dv_local, _ = chain.local(c, v_new, h)
    back = chain.back_summary(c, dv_local).asnumpy().astype(np.float64)
    predicted = back[..., V:] @ dht + back[..., :V]
    _, dh0, _ = chain.state_gradients(c, dv_local, Tensor(h0), Tensor(dht))
    assert relative(dh0.asnumpy(), predicted) <= 1e-5
    assert relative(predicted, want["initial_state"]) <= 5e-5
    assert relative(back[..., V:], np.swapaxes(summary[..., V:], -1, -2)) <= 1e-5


def _calls(chain: Chain):
    """Every stage as a function of one float32 input, and that input."""
    c = chain.prepare()
    h, v_new, _ = chain.states(c, None)
    d_aqk, dv_local, dq_raw = chain.local(c, v_new, h)
    dh, _, dv_scan = chain.state_gradients(c, dv_local, None, None)

    def replaced(name, x):
        return {**c, name: x}

    def prepare(x):
        chain.values["v"] = x
        return chain.prepare()["u"].sum()

    summaries = Tensor(np.zeros((2, 1, 2, 16, 32), np.float32))
    state = Tensor(np.zeros((1, 2, 16, 16), np.float32))
    return {
        "fwd_prepare": (prepare, chain.values["v"]),
        "pre_process_fwd": (lambda x: chain.summary(replaced("u", x)).sum(), c["u"]),
        "fwd_h": (lambda x: chain.states(replaced("u", x), None)[2].sum(), c["u"]),
        "fwd_finalize": (lambda x: chain.output(c, x, h).sum(), v_new),
        "bwd_prepare": (lambda x: chain.local(c, x, h)[0].sum(), v_new),
        "pre_process_bwd": (lambda x: chain.back_summary(c, x).sum(), dv_local),
        "bwd_dhu": (lambda x: chain.state_gradients(c, x, None, None)[2].sum(), dv_local),
        "bwd_finalize": (lambda x: chain.input_gradients(c, x, h, dh, dv_scan, d_aqk, dq_raw)["q"].sum(), v_new),
        "merge_fwd_bwd": (lambda x: kcp_ops.chunk_kda_merge_fwd_bwd(state, x, 1, 1).sum(), summaries),
    }


STAGES = (
    "fwd_prepare", "pre_process_fwd", "fwd_h", "fwd_finalize", "bwd_prepare", "pre_process_bwd", "bwd_dhu",
    "bwd_finalize", "merge_fwd_bwd",
)  # fmt: skip


@pytest.mark.parametrize("stage", STAGES)
def test_no_gradient_through_a_stage(stage):
    """Taking one raises, and says which stage and what is differentiable instead."""
    function, x = _calls(Chain(make_problem(8, T=20)))[stage]
    function(x)
    with pytest.raises(Exception, match=rf"(?s){stage}.*chunk_kda"):
        ms.grad(function)(x).asnumpy()
