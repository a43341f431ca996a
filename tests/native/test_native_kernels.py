"""The kernels through ctypes, against the float64 token recurrence: every option, shape, packing and storage type."""

import dataclasses

import numpy as np
import pytest
from native_driver import Options, Problem, from_bf16, to_bf16
from native_recurrence import kda, make_inputs

OUTPUT, GRADIENT = 1e-6, 1e-5
BF16, F16 = 5e-3, 6e-4  # one rounding of the result and of what the kernels read

CASES = {
    "T200": dict(tokens=200),
    "one_token": dict(tokens=1),
    "T17": dict(tokens=17),
    "T40": dict(tokens=40),
    "T63": dict(tokens=63),
    "T64": dict(tokens=64),
    "T65": dict(tokens=65, heads=3),
    "softplus": dict(tokens=130, gate="softplus"),
    "softplus_slow": dict(tokens=200, gate="softplus", shift=-9.0),
    "computed_gate": dict(tokens=130, gate="none"),
    "no_a_log_no_bias": dict(tokens=130, a_log=False, dt_bias=False),
    "no_states": dict(tokens=130, initial=False, d_final=False),
    "K64": dict(tokens=130, key=64, value=64),
    "K128_V256": dict(tokens=130, key=128, value=256),
    "K100_V30": dict(tokens=130, key=100, value=30),
    "K5_V7": dict(tokens=130, key=5, value=7),
    "K256_V250": dict(tokens=70, key=256, value=250),
    "gqa": dict(tokens=130, heads=4, key_heads=2),
    "mqa_batch": dict(tokens=70, heads=3, key_heads=1, batch=2, key=48, value=40),
    "batch": dict(tokens=70, batch=3),
    "pack": dict(tokens=0, lengths=(20, 0, 65, 1, 130, 64, 0)),
    "pack_gqa": dict(tokens=0, lengths=(3, 70, 0, 17), heads=4, key_heads=2, key=40, value=24),
    "v_first": dict(tokens=130, v_first=True, key=96, value=40),
    "one_head": dict(tokens=400, heads=1),
    "slow_decay": dict(tokens=320, shift=-9.0),
    "correlated": dict(tokens=256, gate="none", spread=1e-3, correlated=0.99),
    "correlated_slow": dict(tokens=256, shift=-9.0, correlated=0.95),
    "decay_30": dict(tokens=130, gate="none", spread=30.0),
    "decay_1000": dict(tokens=130, gate="none", spread=1000.0),
    "no_decay": dict(tokens=130, gate="none", spread=0.0),
    "gates_60": dict(tokens=130, spread=60.0),
    "segments": dict(tokens=4200, heads=1, key=32, value=32),
}
OPTIONS = {
    "head_major": (dict(head_major=True), dict(tokens=130, heads=4, key_heads=2, batch=2)),
    "no_norm": (dict(l2norm=False), dict(tokens=130)),
    "neg_eigval": (dict(neg_eigval=True), dict(tokens=130)),
    "given_beta": (dict(beta_sigmoid=False), dict(tokens=130, beta_range=(0.0, 1.0))),
    "beta_two": (dict(beta_sigmoid=False), dict(tokens=130, beta_range=(1.0, 2.0))),
    "bound_1": (dict(lower_bound=-1.0), dict(tokens=130)),
    "chunk_16": (dict(chunk=16), dict(tokens=130, heads=4, key_heads=2)),
    "chunk_32_pack": (dict(chunk=32), dict(tokens=0, lengths=(20, 0, 65, 1, 130, 64, 0))),
    "chunk_16_one_head": (dict(chunk=16), dict(tokens=400, heads=1)),
    "segments_16": (dict(chunk=16), dict(tokens=1300, heads=1, key=40, value=24, v_first=True)),
    "segments_pack": (dict(chunk=16), dict(tokens=0, lengths=(513, 0, 1100, 1, 512, 600), heads=2, key_heads=1, key=24, value=40)),
    "segments_batch": (dict(chunk=16, head_major=True), dict(tokens=1030, batch=2, heads=3, key=20, value=70, a_log=False)),
    "scale_epsilon": (dict(scale=0.3, epsilon=0.5), dict(tokens=70)),
}


def relative(got, want):
    return np.linalg.norm((got - want).ravel()) / max(np.linalg.norm(want.ravel()), 1e-30)


def setup(native, case, options=None, cache=True, dtype=np.float32, seed=0):
    case = dict(case)
    key = case.get("key", 128)
    o = Options(gate=case.get("gate", "lower_bound"), scale=key**-0.5, state_v_first=case.get("v_first", False))
    o = dataclasses.replace(o, **(options or {}))
    x = make_inputs(np.random.default_rng(seed), **case)
    if not o.l2norm:
        x["k"] *= np.float32(0.5 * key**-0.5)
    return Problem(native, x, o, cache, dtype)


def check(got, want, output=OUTPUT, gradient=GRADIENT):
    want = dict(want)
    scale = want.pop("da_log_scale", None)
    for name, truth in want.items():
        assert np.isfinite(got[name]).all(), name
        if name == "da_log":
            assert np.max(np.abs(got[name] - truth) / np.maximum(scale, 1e-30)) <= gradient, name
        elif np.linalg.norm(truth) < 1e-12:
            assert np.max(np.abs(got[name])) <= 1e-6, name
        else:
            assert relative(got[name], truth) <= (output if name in ("out", "final_state") else gradient), name


def results(problem):
    return {**problem.forward(), **problem.backward()}


@pytest.mark.parametrize("case", CASES)
def test_against_float64(native, case):
    problem = setup(native, CASES[case], seed=len(case))
    check(results(problem), kda(problem.x, problem.o))


@pytest.mark.parametrize("option", OPTIONS)
def test_options(native, option):
    options, case = OPTIONS[option]
    problem = setup(native, case, options)
    check(results(problem), kda(problem.x, problem.o))


@pytest.mark.parametrize("case", ["T200", "pack_gqa", "one_head", "batch", "segments", "segments_16", "segments_pack", "segments_batch"])
def test_recompute_gives_the_bits_of_saved(native, case, monkeypatch):
    """In one go or segment by segment, by head or (few heads for the threads) by columns and chunks, longer ones for many threads."""
    options, case = OPTIONS[case] if case in OPTIONS else ({}, CASES[case])
    want = results(setup(native, case, options))
    for threads in (1, 2, 40):
        monkeypatch.setenv("KCP_NUM_THREADS", str(threads))
        got = results(setup(native, case, options, cache=False))
        for name in want:
            assert np.array_equal(want[name], got[name]), (threads, name)


def test_segments_need_their_states(native):
    """A backward that is given too few states between its segments says so."""
    problem = setup(native, CASES["segments"], cache=False)
    problem.forward()
    problem.cache = problem.cache[:-1].copy()
    with pytest.raises(AssertionError):
        problem.backward()


@pytest.mark.parametrize("case", ["T200", "pack", "one_head", "gqa"])
def test_bits_do_not_depend_on_threads(native, case, monkeypatch):
    seen = []
    for threads in (1, 2, 3, 7):
        monkeypatch.setenv("KCP_NUM_THREADS", str(threads))
        assert native.lib.kcp_num_threads() == threads
        problem = setup(native, CASES[case])
        seen.append({**results(problem), "summary": problem.summary(), "d_initial": problem.backward_summary()})
    for other in seen[1:]:
        for name, x in other.items():
            assert np.array_equal(x, seen[0][name]), name


@pytest.mark.parametrize("dtype,limit", [("bfloat16", BF16), (np.float16, F16)])
def test_storage_types(native, dtype, limit):
    problem = setup(native, CASES["pack_gqa"], dtype=dtype)
    rounded = dict(problem.x)
    for name in ("q", "k", "v", "g", "beta", "d_out"):
        stored = problem.store(problem.x[name])
        rounded[name] = from_bf16(stored) if dtype == "bfloat16" else stored.astype(np.float32)
    check(results(problem), kda(rounded, problem.o), limit, limit)


@pytest.mark.parametrize("bits", [0x0001, 0x03FF, 0x0400, 0x8001, 0x3C00, 0x7BFF, 0xFBFF])
def test_every_kind_of_half_passes_through(native, bits):
    """v of one token comes back as o = scale (q.k) beta v with q = k = e_0 and beta = 1."""
    value = np.array([bits], np.uint16).view(np.float16)
    x = make_inputs(np.random.default_rng(0), 1, heads=1, key=4, value=1, gate="none", initial=False, d_final=False)
    x["q"][...] = x["k"][...] = np.array([1, 0, 0, 0], np.float32)
    x["beta"][...], x["v"][...] = 1, value.astype(np.float32)
    problem = Problem(native, x, Options(gate="none", l2norm=False, beta_sigmoid=False), dtype=np.float16)
    assert problem.forward()["out"].astype(np.float16).view(np.uint16).ravel()[0] == bits


def test_streamed_results_equal_stored_ones(native):
    """Above 8 MiB results leave around the caches: the same tokens alone give the same bits."""
    problem = setup(native, dict(tokens=2500, heads=4, initial=False, d_final=False))
    short = {n: a[:, :640] if a.ndim > 2 else a for n, a in problem.x.items()}
    few = Problem(native, {n: np.ascontiguousarray(a) for n, a in short.items()}, problem.o)
    assert np.array_equal(problem.forward()["out"][:, :640], few.forward()["out"])


def test_head_ranges_are_slices(native):
    case = dict(tokens=130, heads=6, key_heads=3, batch=2)
    whole = setup(native, case)
    want = {**results(whole), "summary": whole.summary(), "d_initial": whole.backward_summary()}
    for first, last in ((0, 2), (2, 6)):
        options = dataclasses.replace(whole.o, heads=(first, last))
        x = dict(whole.x)
        for name in ("initial_state", "d_final_state"):
            x[name] = np.ascontiguousarray(x[name][:, first:last])
        part = Problem(native, x, options)
        got = {**results(part), "summary": part.summary(), "d_initial": part.backward_summary()}
        for name in got:
            lo, hi = (first // 2, last // 2) if name in ("dq", "dk") else (first, last)
            axis = 0 if name in ("da_log", "ddt_bias") else 1 if "state" in name or name in ("summary", "d_initial") else 2
            assert np.array_equal(got[name], np.take(want[name], range(lo, hi), axis)), name


@pytest.mark.parametrize("case", ["T200", "pack", "K100_V30", "slow_decay"])
def test_summaries(native, case):
    problem = setup(native, CASES[case])
    want = kda(problem.x, problem.o)
    value = problem.value
    alone = Problem(native, {n: a for n, a in problem.x.items() if n != "initial_state"}, problem.o)
    both = alone.summary().astype(np.float64)
    transition = both[..., value:]
    composed = both[..., :value] + transition @ problem.x["initial_state"]
    assert relative(composed, want["final_state"]) <= OUTPUT
    assert relative(problem.summary(want_m=False), want["final_state"]) <= OUTPUT
    problem.forward()
    assert relative(problem.backward_summary(), want["d_initial_state"]) <= GRADIENT
    quiet = Problem(native, {n: a for n, a in problem.x.items() if n != "d_final_state"}, problem.o)
    quiet.forward()
    composed = quiet.backward_summary() + np.swapaxes(transition, -1, -2) @ problem.x["d_final_state"]
    assert relative(composed, want["d_initial_state"]) <= GRADIENT


def test_nothing_behind_the_buffers_is_read(native):
    """1e30 right behind every input, and guard words behind every output, stay where they are."""
    problem = setup(native, dict(tokens=70, heads=2, key=20, value=12, batch=1))
    want = results(problem)
    call = native.call

    def guarded(name, arrays):
        copies = []
        for a in arrays:
            big = np.full(a.size + 64, 1e30 if a.dtype == np.float32 else 77, a.dtype)
            view = big[: a.size].reshape(a.shape)
            view[...] = a
            copies.append((big, view))
        code = call(name, [v for _, v in copies])
        for (big, view), a in zip(copies, arrays, strict=True):
            assert (big[a.size :] == big.dtype.type(1e30 if a.dtype == np.float32 else 77)).all()
            a[...] = view
        return code

    problem.native = type("Guarded", (), {"call": staticmethod(guarded)})()
    got = results(problem)
    for name in want:
        assert np.array_equal(got[name], want[name]), name


def test_twenty_runs_give_the_same_bits(native):
    first = results(setup(native, CASES["gqa"]))
    for _ in range(20):
        for name, x in results(setup(native, CASES["gqa"])).items():
            assert np.array_equal(x, first[name]), name


def test_nan_stays_in_its_head(native):
    problem = setup(native, dict(tokens=130, heads=3))
    clean = problem.forward()["out"].copy()
    problem.x["v"][0, 5, 1, 0] = np.nan
    out = problem.forward()["out"]
    assert np.isnan(out[0, 5:, 1]).any()
    assert np.array_equal(out[:, :, [0, 2]], clean[:, :, [0, 2]])


def test_tokens_after_the_last_boundary_are_zeros(native):
    problem = setup(native, dict(tokens=0, lengths=(20, 30)))
    problem.x["cu_seqlens"] = np.array([0, 20, 40], np.int32)
    problem = Problem(native, problem.x, problem.o)
    got = results(problem)
    for name in ("out", "dq", "dk", "dv", "dg", "dbeta"):
        assert (got[name][:, 40:] == 0).all() and np.isfinite(got[name]).all(), name


@pytest.mark.parametrize("bounds", [(0, 30, 20, 50), (1, 20, 50), (0, 20, 51), (0, 2_000_000_000)])
def test_bad_boundaries_are_refused(native, bounds):
    problem = setup(native, dict(tokens=0, lengths=(20, 30)))
    problem.x["cu_seqlens"] = np.array([0, 50], np.int32)
    problem = Problem(native, problem.x, problem.o)
    problem.x["cu_seqlens"] = np.array(bounds, np.int32)
    with pytest.raises(AssertionError):
        problem.forward()


def test_bf16_conversion_rounds_to_even():
    x = np.array([1.0, 1.00390625, 1.01171875, 3.4e38, -0.0], np.float32)
    assert np.array_equal(from_bf16(to_bf16(x))[:3], np.array([1.0, 1.0, 1.015625], np.float32))
