"""Missing symbols one at a time, other versions' signatures, limits and their texts."""

from __future__ import annotations

import importlib
import logging
import sys

import emulator
import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, ops
from op_cases import errors, make_problem, run
from stage_chain import Chain
from test_ascend_stages import bf16_problem, within

from kcp import ops as kcp_ops
from kcp.ops import backends
from kcp.ops.backends import ascend, ascend_symbols

STATES = {"initial_state": True, "d_final": True}
BRINGS = ["hyper_parallel.custom_ops.experimental has no", "kda_r1.0", "FLA-NPU 70eb6ba8"]


def test_without_hyper_parallel():
    """The module imports, and every stage says what to install."""
    module = importlib.reload(importlib.import_module("kcp.ops.backends.ascend"))
    ascend_symbols.forget()
    for stage in backends.SERVED:
        assert "device target is CPU" in module.unavailable(stage)
        assert "hyper_parallel is not installed" in ascend_symbols.find(stage)
        assert "kda_r1.0" in ascend_symbols.find(stage)


@pytest.mark.parametrize("stage", ascend.CHAIN)
def test_a_missing_symbol_disables_its_stage_alone(stage, caplog):
    problem = bf16_problem(**STATES)
    with emulator.installed(missing=(stage,)), caplog.at_level(logging.WARNING, "kcp"):
        got = run(problem)
        used = set(emulator.calls)
    assert used == set(ascend.CHAIN) - {stage}
    within(errors(got, problem.truth()))
    announced = [r.message for r in caplog.records if "ascend backend" in r.message]
    assert len(announced) == 1 and f"; completed by the next backend: {stage} (" in announced[0]
    said = [r.message for r in caplog.records if f"kcp: {stage} is served by " in r.message]
    assert len(said) == 1 and all(text in said[0] for text in BRINGS)


@pytest.mark.parametrize("stage", emulator.STAGES)
def test_a_missing_public_stage(stage):
    with emulator.installed(missing=(stage,)):
        assert backends.select(stage).__name__ != "kcp.ops.backends.ascend"
        assert all(backends.select(s).__name__ == "kcp.ops.backends.ascend" for s in emulator.STAGES if s != stage)
        with backends.use("ascend"), pytest.raises(RuntimeError) as raised:
            backends.select(stage)
        for text in (*BRINGS, f"npu_chunk_kda_{stage}"):
            assert text in str(raised.value)


def test_a_missing_op_leaves_the_chain():
    problem = bf16_problem(gate="softplus")
    with emulator.installed(missing=("chunk_kda",)):
        got = run(problem)
        assert {"fwd_prepare", "fwd_h", "fwd_finalize", "bwd_prepare", "bwd_dhu"} <= set(emulator.calls)
    within(errors(got, problem.truth()))


def test_no_symbol_at_all():
    with emulator.installed(missing=tuple(emulator.SYMBOLS)):
        assert backends.select("chunk_kda").__name__ != "kcp.ops.backends.ascend"
        assert "has no npu_chunk_kda;" in ascend.unavailable("chunk_kda")


def test_a_forced_backend_completes_nothing():
    with emulator.installed(missing=("bwd_dhu",)), backends.use("ascend"):
        with pytest.raises(RuntimeError, match=r"^bwd_dhu: .*has no npu_chunk_kda_bwd_dhu.*asked for by name"):
            run(bf16_problem(**STATES))


def test_a_package_that_fails_to_import(monkeypatch):
    """A broken build is a reason, not a crash."""
    real = importlib.import_module

    def broken(name, *rest):
        if name == ascend_symbols.PACKAGE:
            raise OSError("libfla.so: cannot open shared object file")
        return real(name, *rest)

    monkeypatch.setattr(importlib, "import_module", broken)
    ascend_symbols.forget()
    assert "can't be imported (OSError: libfla.so" in ascend_symbols.find("fwd_h")
    monkeypatch.undo()
    ascend_symbols.forget()


# ---- other versions


def merge_in_another_order(summaries, state, rank, pre_or_post_num_ranks, forward=True):
    return emulator.npu_chunk_kda_merge_fwd_bwd(state, summaries, pre_or_post_num_ranks, rank, forward=forward)


def finalize_of_effective_beta(
    q, k, v, gk, raw_g, beta, a_log, dt_bias, akk, v_new, h, dh, dv_scan, dAqk, dq_raw, q_rstd=None, k_rstd=None, cu_seqlens=None,
    chunk_indices=None, scale=1.0, lower_bound=-5.0, chunk_size=64,
):  # fmt: skip
    """The first version's kernel: no beta flags, other spelling and defaults."""
    return emulator.npu_chunk_kda_bwd_finalize(
        q, k, v, gk, raw_g, beta, a_log, dt_bias, akk, v_new, h, dh, dv_scan, dAqk, dq_raw, q_rstd=q_rstd, k_rstd=k_rstd,
        cu_seqlens=cu_seqlens, chunk_indices=chunk_indices, scale=scale, lower_bound=lower_bound,
    )  # fmt: skip


def swapped(x):
    return ops.swapaxes(x, 1, 2)


def heads_first_fwd_h(k, w, u, **options):
    h, v_new, final_state = emulator.npu_chunk_kda_fwd_h(k, w, u, **options)
    return swapped(h), v_new, final_state


def heads_first_finalize(qg_scaled, aqk, v_new, h, **options):
    return emulator.npu_chunk_kda_fwd_finalize(qg_scaled, aqk, v_new, swapped(h), **options)


def heads_first_bwd_prepare(aqk, v_new, d_o, h, **options):
    return emulator.npu_chunk_kda_bwd_prepare(aqk, v_new, d_o, swapped(h), **options)


def heads_first_dhu(q, k, w, d_o, dv, scale, **options):
    dh, dh0, scan = emulator.npu_chunk_kda_bwd_dhu(q, k, w, d_o, dv, scale, **options)
    return swapped(dh), dh0, scan


def heads_first_bwd_finalize(**options):
    return emulator.npu_chunk_kda_bwd_finalize(**{**options, "h": swapped(options["h"]), "dh": swapped(options["dh"])})


def narrow(states):
    """Boundary states as versions want them that take bfloat16 alone."""
    assert states is None or states.dtype == ms.bfloat16
    return None if states is None else states.astype(ms.float32)


def narrow_fwd_h(k, w, u, initial_state=None, **options):
    return emulator.npu_chunk_kda_fwd_h(k, w, u, initial_state=narrow(initial_state), **options)


def narrow_dhu(q, k, w, d_o, dv, scale, h0=None, dht=None, **options):
    return emulator.npu_chunk_kda_bwd_dhu(q, k, w, d_o, dv, scale, h0=narrow(h0), dht=narrow(dht), **options)


class Uninspectable:
    """A function whose signature can't be read, as of some extension modules."""

    __signature__ = "none"

    def __init__(self, function):
        self.function = function

    def __call__(self, *tensors, **options):
        return self.function(*tensors, **options)


VERSIONS = {
    "effective_beta": ({"bwd_finalize": finalize_of_effective_beta}, {"allow_neg_eigval": True}),
    "heads_before_chunks": (
        {"fwd_h": heads_first_fwd_h, "fwd_finalize": heads_first_finalize, "bwd_prepare": heads_first_bwd_prepare,
         "bwd_dhu": heads_first_dhu, "bwd_finalize": heads_first_bwd_finalize},
        {"T": 128},
    ),
    "no_signatures": ({s: Uninspectable(f) for s, f in emulator.SYMBOLS.items()}, {}),
}  # fmt: skip


@pytest.mark.parametrize("version", VERSIONS)
def test_other_versions_of_the_chain(version):
    """Dispatch by inspected signature; 128 tokens and two heads make chunks and heads indistinguishable by shape."""
    functions, changes = VERSIONS[version]
    problem = bf16_problem(2, **STATES, **changes)
    with emulator.installed(versions=functions):
        got = run(problem)
        assert {"fwd_h", "bwd_dhu", "bwd_finalize"} <= set(emulator.calls)
    within(errors(got, problem.truth()))


def test_states_in_bfloat16(monkeypatch):
    problem = bf16_problem(2, **STATES)
    monkeypatch.setenv("KCP_ASCEND_STATE_DTYPE", "bfloat16")
    with emulator.installed(versions={"fwd_h": narrow_fwd_h, "bwd_dhu": narrow_dhu}):
        within(errors(run(problem), problem.truth()))
        assert {"fwd_h", "bwd_dhu"} <= set(emulator.calls)


def test_merge_of_another_order():
    summaries = (0.1 * np.random.default_rng(1).standard_normal((3, 1, 128, 256))).astype(np.float32)
    state = Tensor(np.zeros((1, 128, 128), np.float32))
    with emulator.installed(versions={"merge_fwd_bwd": merge_in_another_order}):
        got = kcp_ops.chunk_kda_merge_fwd_bwd(state, Tensor(summaries), 2, 2, state_v_first=True).asnumpy()
        assert emulator.calls == ["merge_fwd_bwd"]
    want = summaries[1, :, :, 128:] @ summaries[0, :, :, :128] + summaries[1, :, :, :128]
    assert np.allclose(got, np.swapaxes(want, -1, -2), atol=1e-5)


def fwd_h_with_a_mask(k, w, u, *, gk, mask, **options):
    raise AssertionError("must not be called")


def fwd_h_without_gk(k, w, u, *, initial_state=None):
    raise AssertionError("must not be called")


def prepare_without_neg_eigval(
    q, k, v, g, beta, scale, chunk_size=64, *, layout="BNSD", a_log=None, dt_bias=None, cu_seqlens=None, chunk_indices=None, epsilon=1e-6,
    use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False, use_beta_sigmoid_in_kernel=False, safe_gate=False, lower_bound=-5.0,
    use_exp2=True, backward_mode="save",
):  # fmt: skip
    raise AssertionError("must not be called")


@pytest.mark.parametrize(
    ("stage", "function", "changes", "text"),
    [
        ("fwd_h", fwd_h_with_a_mask, {}, "npu_chunk_kda_fwd_h of the installed version requires mask, which kcp does not know"),
        ("fwd_h", fwd_h_without_gk, {}, "npu_chunk_kda_fwd_h of the installed version takes no gk"),
        ("fwd_prepare", prepare_without_neg_eigval, {"allow_neg_eigval": True},
         "npu_chunk_kda_fwd_prepare of the installed version takes no allow_neg_eigval; allowed: False"),
    ],
)  # fmt: skip
def test_versions_that_kcp_can_not_call(stage, function, changes, text, caplog):
    problem = bf16_problem(3, **STATES, **changes)
    with emulator.installed(versions={stage: function}), caplog.at_level(logging.WARNING, "kcp"):
        within(errors(run(problem), problem.truth()))
        with backends.use("ascend"), pytest.raises(RuntimeError, match=text):
            run(problem)
    assert sum(f"{stage} is served by" in r.message and text in r.message for r in caplog.records) == 1


# ---- limits

OP_LIMITS = {
    "K": ({"K": 64, "V": 128}, "K is 64; the kernels take 128"),
    "V": ({"V": 64}, "V is 64; the kernels take 128"),
    "chunk": ({"chunk_size": 32}, "chunk_size is 32; the kernels take 64"),
    "dtype": ({"dtype": "float32"}, "the dtype of q, k and v is Float32; the kernels take BFloat16"),
    "half": ({"dtype": "float16"}, "the dtype of q, k and v is Float16; the kernels take BFloat16"),
}


@pytest.mark.parametrize("limit", OP_LIMITS)
def test_limits_of_the_op(limit, caplog):
    """Completed by another backend with one log line; refused with the exact limit where ascend was asked for by name."""
    changes, text = OP_LIMITS[limit]
    problem = bf16_problem(4, T=5, **changes)
    with emulator.installed(), caplog.at_level(logging.WARNING, "kcp"):
        for _ in range(2):
            within(errors(run(problem), problem.truth()))
        assert emulator.calls == []
        with backends.use("ascend"), pytest.raises(RuntimeError, match=f"^chunk_kda: {text}"):
            run(problem)
    assert sum(text in r.message for r in caplog.records) == 1


GATE_LIMITS = {
    "softplus": ({"gate": "softplus", "initial_state": True}, r"safe_gate is False; bwd_finalize takes safe_gate=True"),
    "pre_computed": ({"gate": "none"}, r"the gate is pre-computed \(use_gate_in_kernel=False\); bwd_finalize takes raw gates"),
}


@pytest.mark.parametrize("limit", GATE_LIMITS)
def test_limits_of_the_last_backward_stage(limit):
    changes, text = GATE_LIMITS[limit]
    with emulator.installed(), backends.use("ascend"), pytest.raises(RuntimeError, match=text):
        run(bf16_problem(5, T=5, **changes))


def test_limits_of_the_explicit_stages():
    """Sizes and the type of v; caches of other sizes go to the next backend."""
    small = Chain(make_problem(6, T=5, K=16, initial_state=True, d_final=True))
    with emulator.installed(), backends.use("ascend"):
        with pytest.raises(RuntimeError, match="^fwd_prepare: the dtype of q, k and v is Float32; the kernels take BFloat16"):
            small.prepare()
        kg = Tensor(np.zeros((1, 2, 5, 16), np.float32))
        with pytest.raises(RuntimeError, match="^fwd_h: K is 16; the kernels take 128"):
            kcp_ops.chunk_kda_fwd_h(kg, kg, kg, gk=kg)
        summaries = Tensor(np.zeros((2, 2, 16, 32), np.float32))
        with pytest.raises(RuntimeError, match="^merge_fwd_bwd: K is 16; the kernels take 128"):
            kcp_ops.chunk_kda_merge_fwd_bwd(Tensor(np.zeros((2, 16, 16), np.float32)), summaries, 1, 1)


def test_the_emulator_refuses_what_the_kernels_refuse():
    """The limits that kcp works around are real in the emulation."""
    x = Tensor(np.zeros((2, 1, 4, 128), np.float32)).astype(ms.bfloat16)
    gk = Tensor(np.zeros((2, 1, 4, 128), np.float32))
    with pytest.raises(ValueError, match="one launch takes one segment"):
        emulator.npu_chunk_kda_pre_process_bwd(x, x, x, x, x, 1.0, gk=x)
    with pytest.raises(TypeError, match="gk has invalid dtype Float32, expected BFloat16"):
        emulator.npu_chunk_kda_pre_process_bwd(*(y[:1] for y in (x, x, x, x, x)), 1.0, gk=gk[:1])
    with pytest.raises(ValueError, match="pre_process_fwd needs B=1"):
        emulator.npu_chunk_kda_pre_process_fwd(x, x, x, gk=gk, cu_seqlens=[0, 4])
    with pytest.raises(ValueError, match="rise strictly"):
        emulator.npu_chunk_kda_fwd_h(x[:1], x[:1], x[:1], gk=gk[:1], cu_seqlens=[0, 4, 4])
    with pytest.raises(ValueError, match="must be >= 1"):
        emulator.npu_chunk_kda_merge_fwd_bwd(
            Tensor(np.zeros((1, 128, 128), np.float32)), Tensor(np.zeros((2, 1, 128, 256), np.float32)), 0, 0
        )


@pytest.mark.parametrize("name", ["KCP_ASCEND_CORRECTION", "KCP_ASCEND_STATE_DTYPE"])
def test_switches_refuse_other_values(name, monkeypatch):
    monkeypatch.setenv(name, "maybe")
    with emulator.installed(), pytest.raises(ValueError, match=f"^{name} is 'maybe'; allowed: "):
        run(bf16_problem(7, T=5, **STATES))


def test_nothing_of_the_emulation_stays():
    with emulator.installed():
        assert "hyper_parallel" in sys.modules
    assert "hyper_parallel" not in sys.modules
    assert ascend.unavailable("chunk_kda").startswith("it serves Ascend")
