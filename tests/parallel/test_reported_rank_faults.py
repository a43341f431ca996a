"""Faults reported against other implementations, by their number in the shared list; those that concern ranks and layers."""

import mindspore as ms
import numpy as np
import pytest
from core_cases import STRATEGIES, CoreProblem, check, run_explicit
from mindspore import Tensor, ops

from kcp.layers import KdaAttention, KdaAttentionConfig, KdaCore, ShortConv
from kcp.layers.short_conv import tokens_into_document
from kcp.parallel import CpGroup, Halo, lockstep


def _run(problem: CoreProblem) -> dict[str, float]:
    return check(problem, lockstep.run(len(problem.lengths), lambda group: run_explicit(problem, group), problem.lengths))


def _convolution(x, halo, weight, bias, into, d_out):
    """Causal depthwise convolution and silu in float64 after the tokens ``halo``: output, and gradients of x, halo, weight, bias."""
    size, n = weight.shape[-1], x.shape[1]
    extended, taps, pre = np.concatenate((halo, x), 1).astype(np.float64), weight[:, 0].astype(np.float64), bias.astype(np.float64)
    masks = [np.asarray(into >= d, np.float64)[None, :, None] for d in range(size)]
    windows = [extended[:, size - 1 - d : size - 1 - d + n] * masks[d] for d in range(size)]
    pre = pre + sum(windows[d] * taps[:, size - 1 - d] for d in range(size))
    sigmoid = 1.0 / (1.0 + np.exp(-pre))
    d_pre = d_out * sigmoid * (1.0 + pre * (1.0 - sigmoid))
    d_extended, d_weight = np.zeros_like(extended), np.zeros(weight.shape)
    for d in range(size):
        d_extended[:, size - 1 - d : size - 1 - d + n] += d_pre * taps[:, size - 1 - d] * masks[d]
        d_weight[:, 0, size - 1 - d] = (d_pre * windows[d]).sum((0, 1))
    return pre * sigmoid, d_extended[:, size - 1 :], d_extended[:, : size - 1], d_weight, d_pre.sum((0, 1))


def _convolved(group, x, halo, weight, bias, into, d_out):
    """What :func:`_convolution` gives, by ShortConv."""
    conv = ShortConv(group, weight.shape[-1])
    parts = x, halo, Tensor(weight), Tensor(bias)

    def loss(x, halo, weight, bias):
        y = conv.convolve(x, halo, weight, bias, into)
        return (y * Tensor(d_out)).sum(), y

    (_, y), grads = ms.value_and_grad(loss, (0, 1, 2, 3), has_aux=True)(*parts)
    return y, *grads


def _close(got, want, name):
    got = got.asnumpy() if isinstance(got, Tensor) else got
    assert np.all(np.isfinite(got)), name
    assert np.linalg.norm(got - want) <= 1e-6 * np.linalg.norm(want), name


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_reported_fault_01(strategy):
    """A document starts inside a rank, every head has its own a_log, decay is slow: all gradients are one device's."""
    problem = CoreProblem((18,) * 4, strategy, batch=1, num_heads=4, num_v_heads=4, cu_seqlens=(0, 25, 72), decay=0.01)
    assert len(set(problem.arrays()["a_log"])) == 4
    _run(problem)


@pytest.mark.parametrize("lengths", [pytest.param((257, 256, 256, 256), marks=pytest.mark.ci), (1, 1, 1, 0)], ids=str)
def test_reported_fault_02(lengths):
    """T = 1025 and T = 3 on four ranks: unequal slices are right, equal ones refused."""
    for strategy in STRATEGIES:
        _run(CoreProblem(lengths, strategy, batch=1, num_heads=4, num_v_heads=4, head_dim=4, v_head_dim=4, options={"chunk_size": 64}))
    with pytest.raises(ValueError, match=rf"num_tokens is {sum(lengths)}; allowed: a multiple of the group's size 4"):
        CpGroup(0, 4).slice_bounds(sum(lengths))


@pytest.mark.parametrize("documents", [(513, 511), (512, 1, 511)], ids=str)
def test_reported_fault_03(documents):
    """ShortConv where a document's tail or head is shorter than the kernel on a rank."""
    rng = np.random.default_rng(3)
    x, d_out = (rng.standard_normal((1, 1024, 5)).astype(np.float32) for _ in range(2))
    weight, bias = rng.standard_normal((5, 1, 4)).astype(np.float32), rng.standard_normal(5).astype(np.float32)
    boundaries = [0, *np.cumsum(documents).tolist()]
    into = np.concatenate([np.arange(n) for n in documents])
    want = _convolution(x, np.zeros((1, 3, 5)), weight, bias, into, d_out)

    def body(group):
        begin, end = group.slice_bounds(1024)
        local, halo = Tensor(x[:, begin:end].copy()), Halo(group, 3)
        before = halo.construct(local)
        own = tokens_into_document(begin, end, boundaries)
        y, d_x, d_before, d_weight, d_bias = _convolved(group, local, before, weight, bias, own, d_out[:, begin:end].copy())
        return y.asnumpy(), (d_x + halo.bprop(local, before, d_before)[0]).asnumpy(), d_weight.asnumpy(), d_bias.asnumpy()

    y, d_x, d_weight, d_bias = zip(*lockstep.run(2, body), strict=True)
    results = {"y": np.concatenate(y, 1), "x": np.concatenate(d_x, 1), "weight": sum(d_weight), "bias": sum(d_bias)}
    for (name, got), truth in zip(results.items(), (want[0], want[1], want[3], want[4]), strict=True):
        _close(got, truth, name)


@pytest.mark.parametrize("num_tokens", [1, 2])
def test_reported_fault_04(num_tokens):
    """ShortConv on one and two tokens after others (its state): output, all gradients, and the state handed to the next call."""
    rng = np.random.default_rng(4)
    x = rng.standard_normal((2, num_tokens, 5)).astype(np.float32)
    halo = rng.standard_normal((2, 3, 5)).astype(np.float32)
    weight, bias = rng.standard_normal((5, 1, 4)).astype(np.float32), rng.standard_normal(5).astype(np.float32)
    d_out = rng.standard_normal(x.shape).astype(np.float32)
    want = _convolution(x, halo, weight, bias, np.full(num_tokens, 9), d_out)
    got = _convolved(CpGroup.single(), Tensor(x), Tensor(halo), weight, bias, None, d_out)
    for name, a, b in zip(("y", "x", "halo", "weight", "bias"), got, want, strict=True):
        _close(a, b, name)

    whole = np.concatenate((halo, x), 1)
    before = lockstep.run(3, lambda group: Halo(group, 3).construct(_slice(whole, group)).asnumpy(), (3, num_tokens, 0))
    np.testing.assert_array_equal(before[1], halo)
    np.testing.assert_array_equal(before[2], whole[:, -3:])


def _slice(x, group):
    begin, end = group.slice_bounds(x.shape[1])
    return Tensor(x[:, begin:end].copy()) if end > begin else ops.zeros((x.shape[0], 0, x.shape[2]))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("lengths", [(9, 0, 7, 0), (0, 0, 5, 0)], ids=str)
def test_reported_fault_22(strategy, lengths):
    """Ranks without tokens join every collective."""
    _run(CoreProblem(lengths, strategy, num_heads=4, num_v_heads=4))


def test_reported_fault_26(tmp_path):
    """a_log and dt_bias of a loaded checkpoint survive the layer's construction, initialisation and first call."""
    config = KdaAttentionConfig(24, 2, head_dim=8)
    first, second = KdaAttention(config), KdaAttention(config)
    rng = np.random.default_rng(26)
    for parameter in first.get_parameters():
        parameter.set_data(Tensor(rng.standard_normal(parameter.shape).astype(np.float32) * 0.3))
    ms.save_checkpoint(first, str(tmp_path / "layer.ckpt"))
    missing, unused = ms.load_param_into_net(second, ms.load_checkpoint(str(tmp_path / "layer.ckpt")), strict_load=True)
    assert not missing and not unused
    x = Tensor(rng.standard_normal((1, 9, 24)).astype(np.float32))
    second.init_parameters_data()
    second.set_train()
    assert np.array_equal(first(x).asnumpy(), second(x).asnumpy())
    theirs = second.parameters_dict()
    for name, parameter in first.parameters_dict().items():
        np.testing.assert_array_equal(parameter.asnumpy(), theirs[name].asnumpy(), err_msg=name)
    assert {"A_log", "dt_bias"} <= {name.split(".")[-1] for name in theirs}


@pytest.mark.ci
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("reduced_by", ["trainer", "kcp"])
def test_reported_fault_32(strategy, reduced_by):
    """a_log's and dt_bias's gradients after the reduction: within 1e-5, with strong decay and documents cut by ranks."""
    options = {"reduce_replicated_grads": reduced_by}
    for decay in (0.01, 5.0):
        problem = CoreProblem(
            (18,) * 4, strategy, batch=1, num_heads=4, num_v_heads=8, cu_seqlens=(0, 25, 26, 72), decay=decay, options=options
        )
        found = _run(problem)
        assert max(found["a_log"], found["dt_bias"]) <= 1e-5, found


@pytest.mark.parametrize("name", ["q", "k", "v", "g"])
def test_reported_fault_33(name):
    """Ulysses with heads and features exchanged, both multiples of the ranks: refused before anything is sent."""
    problem = CoreProblem((8, 8), "ulysses", num_heads=2, num_v_heads=4, head_dim=8, v_head_dim=6)

    def body(group):
        tensors = problem.rank_tensors(group.rank)
        tensors[name] = tensors[name].swapaxes(2, 3)
        args = [tensors[x] for x in ("q", "k", "v", "g", "beta", "a_log", "dt_bias", "initial_state")]
        with pytest.raises(ValueError, match=r"^[a-z]+ has shape \(2, 8, \d+, \d+\); allowed: "):
            KdaCore(problem.config(), group)(*args)

    lockstep.run(2, body)
