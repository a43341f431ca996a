"""The nine stages inside ``ms.jit``: the values of PyNative, whatever form the boundaries have."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor
from op_cases import boundaries, make_problem, relative, tensor_of, to_numpy

from kcp import ops as kcp_ops

pytestmark = pytest.mark.usefixtures("backend")

C = 16
GATE = {"safe_gate": True, "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True}


def stages(q, k, v, g, beta, a_log, dt_bias, h0, d_o, dht, cu):
    """Outputs, states, summaries and gradients (tensors BNSD, states V-first) of the chain of all stages."""
    caches = kcp_ops.chunk_kda_fwd_prepare(
        q, k, v, g, beta, None, C, a_log=a_log, dt_bias=dt_bias, cu_seqlens=cu, use_qk_l2norm_in_kernel=True, **GATE
    )
    gk, aqk, akk, w, u, qg, kg, qg_scaled, q_hat, k_hat, q_rstd, k_rstd, _ = caches
    summary = kcp_ops.chunk_kda_pre_process_fwd(kg, w, u, gk=gk, cu_seqlens=cu, chunk_size=C)[0]
    h, v_new, final_state = kcp_ops.chunk_kda_fwd_h(
        kg, w, u, gk=gk, initial_state=h0, output_final_state=True, chunk_size=C, cu_seqlens=cu, state_v_first=True
    )
    out = kcp_ops.chunk_kda_fwd_finalize(qg_scaled, aqk, v_new, h, state_v_first=True, cu_seqlens=cu)
    d_aqk, dv_local, dq_raw = kcp_ops.chunk_kda_bwd_prepare(aqk, v_new, d_o, h, chunk_size=C, state_v_first=True, cu_seqlens=cu)
    back = kcp_ops.chunk_kda_pre_process_bwd(qg, kg, w, d_o, dv_local, None, C, gk=gk, cu_seqlens=cu)
    dh, dh0, dv_scan = kcp_ops.chunk_kda_bwd_dhu(
        qg, kg, w, d_o, dv_local, None, C, gk=gk, h0=h0, dht=dht, cu_seqlens=cu, state_v_first=True
    )
    grads = kcp_ops.chunk_kda_bwd_finalize(
        q_hat, k_hat, v, gk, g, beta, a_log, dt_bias, akk, v_new, h, dh, dv_scan, d_aqk, dq_raw, chunk_size=C, state_v_first=True,
        q_rstd=q_rstd, k_rstd=k_rstd, cu_seqlens=cu, **GATE,
    )  # fmt: skip
    merged = kcp_ops.chunk_kda_merge_fwd_bwd(dh0, ms.ops.stack((back, summary)), 1, 1, state_v_first=True)
    return (out, final_state, dh0, summary, back, merged) + grads


@pytest.mark.ci
@pytest.mark.parametrize("lens, form", [(None, "host"), ((5, 0, 30), "host"), ((5, 0, 30), "tensor")])
def test_a_graph_gives_the_values_of_pynative(lens, form):
    problem = make_problem(1, T=35, Hv=4, V=24, lens=lens, initial_state=True, d_final=True, state_v_first=True)
    values = [tensor_of(n, x, "BNSD") for n, x in problem.inputs.items()]
    values += [tensor_of("v", problem.d_out, "BNSD"), Tensor(problem.d_final_state)]
    cu = boundaries(problem.options.get("cu_seqlens"), form, 35, padding=0)
    want = stages(*values, cu)

    @ms.jit
    def with_host_boundaries(*tensors):
        return stages(*tensors, cu)

    got = with_host_boundaries(*values) if form == "host" else ms.jit(stages)(*values, cu)
    assert len(got) == len(want)
    for x, y in zip(got, want, strict=True):
        assert x.shape == y.shape
        assert relative(to_numpy(x), to_numpy(y)) <= 1e-6
    truth = problem.truth()
    assert relative(to_numpy(got[0]), truth["out"]) <= 1e-5
    assert relative(np.swapaxes(to_numpy(got[6]), 1, 2), truth["q"]) <= 5e-5


@pytest.mark.ci
def test_a_wrong_call_is_refused_in_a_graph():
    q, v, g, beta = (Tensor(np.zeros(s, np.float32)) for s in ((1, 2, 20, 8), (1, 2, 20, 12), (1, 2, 20, 8), (1, 2, 20)))

    @ms.jit
    def function(q, v, g, beta):
        caches = kcp_ops.chunk_kda_fwd_prepare(q, q, v, g, beta, None, C)
        return kcp_ops.chunk_kda_fwd_h(caches[6], caches[3], caches[4], gk=caches[0], chunk_size=32, initial_state=v)

    with pytest.raises(ValueError, match=r"initial_state has shape \(1, 2, 20, 12\); allowed: \[N=1, Hv=2, K=8, V=12\]"):
        function(q, v, g, beta)
