"""The KDA layer against a peer's layer in float64 (goldens), and ShortConv on packed documents against NumPy."""

import mindspore as ms
import numpy as np
import pytest
from golden_cases import LAYER_CASES, golden_case
from mindspore import Tensor

from kcp.layers import KdaAttention, KdaAttentionConfig, ShortConv
from kcp.parallel import CpGroup

NAMES = {"f_proj.0": "f_a_proj", "f_proj.1": "f_b_proj", "g_proj.0": "g_a_proj", "g_proj.1": "g_b_proj"}


@pytest.fixture(autouse=True)
def _device(cpu_device):
    return cpu_device


def _relative(a, b):
    a, b = a.astype(np.float64).reshape(-1), b.astype(np.float64).reshape(-1)
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def _ours(name: str) -> str:
    for theirs, ours in NAMES.items():
        name = name.replace(theirs, ours)
    return name


@pytest.mark.parametrize("case", LAYER_CASES)
def test_layer_equals_the_peers_layer_in_float64(case):
    meta, inputs, truth, _ = golden_case("fla_kda_layer_seed1", case)
    config = KdaAttentionConfig(
        hidden_size=96, num_heads=2, num_v_heads=meta["num_v_heads"], head_dim=64, gate_bias=True, safe_gate=meta["gate"] != "softplus"
    )
    layer = KdaAttention(config)
    parameters = {p.name: p for p in layer.get_parameters()}
    theirs = {_ours(n.removeprefix("param/")): n.removeprefix("param/") for n in inputs if n.startswith("param/")}
    assert set(theirs) == set(parameters)
    for name, peer in theirs.items():
        parameters[name].set_data(Tensor(inputs[f"param/{peer}"].reshape(parameters[name].shape)))
    d_y = Tensor(inputs["dy"])

    def loss(x):
        y = layer(x)
        return (y * d_y).sum(), y

    weights = [parameters[name] for name in theirs]
    (_, y), (d_x, grads) = ms.value_and_grad(loss, 0, weights, has_aux=True)(Tensor(inputs["x"]))
    assert _relative(y.asnumpy(), truth["y"]) <= 1e-5
    assert _relative(d_x.asnumpy(), truth["grad_x"]) <= 1e-4
    for (name, peer), grad in zip(theirs.items(), grads, strict=True):
        assert _relative(grad.asnumpy(), truth[f"grad/{peer}"]) <= 1e-4, name


@pytest.mark.parametrize("boundaries", [None, (0, 4, 5, 5, 11)], ids=["one document", "packed"])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_short_conv_never_looks_past_a_document(boundaries, as_tensor):
    if boundaries is None and as_tensor:
        pytest.skip("no boundaries to pass as a Tensor")
    rng = np.random.default_rng(0)
    tokens, width, size = 11, 3, 4
    x, weight = rng.standard_normal((1, tokens, width)), rng.standard_normal((width, 1, size))
    expected = np.zeros((1, tokens, width))
    for begin, end in zip((boundaries or (0, tokens))[:-1], (boundaries or (0, tokens))[1:], strict=True):
        for t in range(begin, end):
            for d in range(min(size, t - begin + 1)):
                expected[0, t] += weight[:, 0, size - 1 - d] * x[0, t - d]
    expected = expected / (1 + np.exp(-expected))
    cu = Tensor(np.array(boundaries, np.int32)) if as_tensor else boundaries
    got = ShortConv(CpGroup.single(), size)(Tensor(x.astype(np.float32)), Tensor(weight.astype(np.float32)), None, cu)
    np.testing.assert_allclose(got.asnumpy(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("as_tensor", [False, True])
def test_short_conv_takes_boundaries_per_row(as_tensor):
    rng = np.random.default_rng(1)
    x, weight = rng.standard_normal((2, 9, 3)).astype(np.float32), rng.standard_normal((3, 1, 4)).astype(np.float32)
    rows = ((0, 4, 9, 9), (0, 9, 9, 9))
    conv, w = ShortConv(CpGroup.single(), 4), Tensor(weight)
    got = conv(Tensor(x), w, None, Tensor(np.array(rows, np.int32)) if as_tensor else rows).asnumpy()
    for b, row in enumerate(rows):
        np.testing.assert_array_equal(got[b : b + 1], conv(Tensor(x[b : b + 1]), w, None, row).asnumpy())


def test_starting_decays_are_slow_in_both_gates():
    for safe in (False, True):
        layer = KdaAttention(KdaAttentionConfig(hidden_size=16, num_heads=2, head_dim=8, safe_gate=safe))
        a_log, dt_bias = layer.A_log.asnumpy().reshape(-1, 1), layer.dt_bias.asnumpy().reshape(2, 8).astype(np.float64)
        decay = -5.0 / (1 + np.exp(-np.exp(a_log) * dt_bias)) if safe else -np.exp(a_log) * np.log1p(np.exp(dt_bias))
        assert np.all(decay < 0) and np.all(decay > -1.7)
        assert np.all(np.abs(decay) >= 0.9e-3)


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("batch", [1, 2])
def test_one_rank_takes_boundaries_in_every_form(batch, jit):
    """One list or one row of a Tensor for a batch of one, one a row for more: the same bits, in PyNative and compiled."""
    layer = KdaAttention(KdaAttentionConfig(hidden_size=8, num_heads=1, head_dim=4))
    x = Tensor(np.random.default_rng(0).standard_normal((batch, 12, 8)).astype(np.float32))
    rows = [[0, 5, 12, 12], [0, 12, 12, 12]][:batch]
    run = ms.jit(layer.construct) if jit else layer
    want = np.concatenate([layer(x[b : b + 1], rows[b]).asnumpy() for b in range(batch)])
    np.testing.assert_allclose(run(x, Tensor(np.array(rows, np.int32))).asnumpy(), want, rtol=1e-6, atol=1e-7)
    if batch == 1:
        np.testing.assert_allclose(run(x, Tensor(np.array(rows[0], np.int32))).asnumpy(), want, rtol=1e-6, atol=1e-7)
