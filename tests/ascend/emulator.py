"""A stand-in for Hyper-Parallel's ``npu_chunk_kda*`` functions on the CPU, written from its document and from the kernels' limits.

Signatures are those of sections 4 and 5 of the Hyper-Parallel document. Numbers are NumPy float32 (exponents float64), and whatever a
kernel stores as bfloat16 is rounded to it: Aqk, Akk, w, u, qg, kg, qg_scaled, q_hat, k_hat, h, v_new, dv_local, dh, dv_scan and the
gradients of q, k and v. gk, rstd, beta_eff, d_aqk, dq_raw, summaries, states and merges are float32. Matrix products take the stored
operands. Nothing of kcp is imported for the mathematics, which is the textbook form of section 2 of the design: all pairs of a chunk at
once, ``numpy.linalg.inv`` for the solve.

:func:`installed` puts the functions where kcp looks for them; missing symbols and other versions are arguments.
"""

from __future__ import annotations

import contextlib
import sys
import types

import numpy as np
from emulated_stages import (
    gradients,
    npu_chunk_kda_bwd_dhu,
    npu_chunk_kda_bwd_finalize,
    npu_chunk_kda_bwd_prepare,
    npu_chunk_kda_fwd_finalize,
    npu_chunk_kda_fwd_h,
    npu_chunk_kda_fwd_prepare,
    npu_chunk_kda_merge_fwd_bwd,
    npu_chunk_kda_pre_process_bwd,
    npu_chunk_kda_pre_process_fwd,
)
from emulated_storage import WIDTH, bf16, calls, f32, need, need_attributes, read, sequences
from mindspore import Tensor, ops
from mindspore.common._grad_function import _Function

# ---- the differentiable op


class _ChunkKda(_Function):
    """``npu_chunk_kda``: forward and backward over the stages above, by Hyper-Parallel's two routes."""

    @staticmethod
    def forward(ctx, options, q, k, v, g, beta, a_log, dt_bias, initial_state):
        ctx.options, ctx.shape = options, tuple(q.shape)
        heads = v.shape[1]
        repeat = heads // q.shape[1]
        c = npu_chunk_kda_fwd_prepare(q, k, v, g, beta, options["scale"], a_log=a_log, dt_bias=dt_bias, **options["prepare"])
        gk, aqk, akk, w, u, qg, kg, qg_scaled, q_hat, k_hat, q_rstd, k_rstd, _ = c
        packing = {n: options["prepare"][n] for n in ("cu_seqlens", "chunk_indices")}
        v_first = options["state_v_first"]
        h, v_new, final = npu_chunk_kda_fwd_h(
            kg, w, u, gk=gk, initial_state=initial_state, output_final_state=True, state_v_first=v_first, **packing
        )
        out = npu_chunk_kda_fwd_finalize(qg_scaled, aqk, v_new, h, state_v_first=v_first, **packing)
        ctx.repeat, ctx.packing = repeat, packing
        ctx.has = (dt_bias is not None, initial_state is not None)
        ctx.cache = (v, g, beta, a_log, dt_bias, initial_state, gk, aqk, akk, w, qg, kg, q_hat, k_hat, q_rstd, k_rstd, h, v_new)
        ctx.set_materialize_grads(False)
        return out, final

    @staticmethod
    def backward(ctx, d_out, d_final):
        options, packing = ctx.options, ctx.packing
        v, g, beta, a_log, dt_bias, h0, gk, aqk, akk, w, qg, kg, q_hat, k_hat, q_rstd, k_rstd, h, v_new = ctx.cache
        if d_final is not None and not options["chain"]:
            raise RuntimeError("npu_chunk_kda: final_state must not take part in the loss on the fused backward path")
        scale, v_first = options["scale"], options["state_v_first"]
        do = bf16(np.zeros(v_new.shape)) if d_out is None else ops.swapaxes(d_out, 1, 2)
        d_aqk, dv_local, dq_raw = npu_chunk_kda_bwd_prepare(aqk, v_new, do, h, scale=scale, state_v_first=v_first, **packing)
        dh, dh0, scan = npu_chunk_kda_bwd_dhu(qg, kg, w, do, dv_local, scale, gk=gk, h0=h0, dht=d_final, state_v_first=v_first, **packing)
        all_chunks = sequences(v.shape[0], v.shape[2], packing["cu_seqlens"], packing["chunk_indices"])
        prepare, rep = options["prepare"], ctx.repeat
        hn = np.swapaxes(read(h), -1, -2) if v_first else read(h)
        caches = (read(akk), read(v_new), hn, read(dh), read(scan), read(d_aqk), read(dq_raw), read(gk).astype(np.float64))
        rstds = None
        if prepare["use_qk_l2norm_in_kernel"]:
            rstds = tuple(np.repeat(read(x), rep, 1) for x in (q_rstd, k_rstd))
        bias = np.zeros(v.shape[1] * WIDTH, np.float32) if dt_bias is None else read(dt_bias)
        gains = (prepare["use_beta_sigmoid_in_kernel"], 2.0 if prepare["allow_neg_eigval"] else 1.0)
        grads = gradients(
            np.repeat(read(q_hat), rep, 1), np.repeat(read(k_hat), rep, 1), read(v), read(g), read(beta), read(a_log), bias, caches,
            all_chunks, scale, rstds, gains, prepare["lower_bound"] if prepare["safe_gate"] else None,
        )  # fmt: skip
        dq, dk, dv, db, dg, da_log, ddt_bias = grads
        dq, dk = (x.reshape(x.shape[0], -1, rep, *x.shape[2:]).sum(2) for x in (dq, dk))
        grads = (bf16(dq), bf16(dk), bf16(dv), Tensor(dg).astype(g.dtype), Tensor(db).astype(beta.dtype), f32(da_log))
        return (None, *grads, f32(ddt_bias) if ctx.has[0] else None, dh0 if ctx.has[1] else None)


def npu_chunk_kda(
    q, k, v, g, beta, scale, chunk_size=64, *, layout="BNSD", output_final_state=False, safe_gate=False, lower_bound=-5.0,
    use_gate_in_kernel=True, a_log=None, dt_bias=None, cu_seqlens=None, chunk_indices=None, initial_state=None, disable_recompute=True,
    state_v_first=False, epsilon=1e-6, use_qk_l2norm_in_kernel=False, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False,
    use_exp2=True,
):  # fmt: skip
    need_attributes(chunk_size, use_exp2)
    need(layout in ("BNSD", "BSND"), f"layout {layout} is not emulated")
    need(use_gate_in_kernel and a_log is not None, "training needs a raw gate with a_log")
    before = len(calls)
    calls.append("chunk_kda")
    if layout == "BSND":
        q, k, v, g, beta = (ops.swapaxes(x, 1, 2) for x in (q, k, v, g, beta))
    chain = safe_gate or initial_state is not None or not disable_recompute or state_v_first
    prepare = {
        "cu_seqlens": cu_seqlens, "chunk_indices": chunk_indices, "epsilon": epsilon, "safe_gate": safe_gate, "lower_bound": lower_bound,
        "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel, "use_gate_in_kernel": True, "allow_neg_eigval": allow_neg_eigval,
        "use_beta_sigmoid_in_kernel": use_beta_sigmoid_in_kernel,
    }  # fmt: skip
    options = {"scale": scale, "prepare": prepare, "state_v_first": state_v_first, "chain": chain}
    out, final_state = _ChunkKda.apply(options, q, k, v, g, beta, a_log, dt_bias, initial_state)
    del calls[before + 1 :]
    return out, final_state if output_final_state else None


# ---- installation

SYMBOLS = {
    "chunk_kda": npu_chunk_kda,
    "fwd_prepare": npu_chunk_kda_fwd_prepare,
    "pre_process_fwd": npu_chunk_kda_pre_process_fwd,
    "fwd_h": npu_chunk_kda_fwd_h,
    "fwd_finalize": npu_chunk_kda_fwd_finalize,
    "bwd_prepare": npu_chunk_kda_bwd_prepare,
    "pre_process_bwd": npu_chunk_kda_pre_process_bwd,
    "bwd_dhu": npu_chunk_kda_bwd_dhu,
    "bwd_finalize": npu_chunk_kda_bwd_finalize,
    "merge_fwd_bwd": npu_chunk_kda_merge_fwd_bwd,
}
STAGES = tuple(SYMBOLS)[1:]


@contextlib.contextmanager
def installed(missing: tuple = (), versions: dict | None = None):
    """Hyper-Parallel as if it were installed, and kcp's Ascend backend allowed on the CPU.

    Args:
        missing: stages whose symbols this version does not have.
        versions: stage -> function that this version has in its place.
    """
    from kcp.ops.backends import ascend, ascend_chain, ascend_layout, ascend_symbols

    names = ("hyper_parallel", "hyper_parallel.custom_ops", "hyper_parallel.custom_ops.experimental")
    before = {name: sys.modules.get(name) for name in names}
    modules = {name: types.ModuleType(name) for name in names}
    modules["hyper_parallel"].__version__ = "1.0.0 (emulated)"
    for stage, function in {**SYMBOLS, **(versions or {})}.items():
        if stage not in missing:
            setattr(modules[names[2]], ascend_symbols.name_of(stage), function)
    sys.modules.update(modules)
    devices, ascend.DEVICES = ascend.DEVICES, ("Ascend", "CPU")

    def forget():
        ascend_symbols.forget()
        ascend_chain._said.clear()
        ascend._announced.clear()
        ascend_layout._chunk_axes.clear()
        calls.clear()

    forget()
    try:
        yield modules[names[2]]
    finally:
        ascend.DEVICES = devices
        for name, module in before.items():
            if module is None:
                sys.modules.pop(name)
            else:
                sys.modules[name] = module
        forget()
