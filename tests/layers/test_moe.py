"""The mixture of experts against float64 NumPy: routing by groups and bias, values and gradients, refusals."""

import mindspore as ms
import numpy as np
import pytest
from layer_checks import Weighted, check, np_sigmoid, relative
from mindspore import Tensor

from kcp.layers.moe import MoeConfig, Router, SparseMoe
from kcp.ops import backends

SIZES = {"hidden_size": 5, "intermediate_size": 6, "num_experts": 4, "num_experts_per_token": 2, "routed_scaling_factor": 2.446}
WIDE = {"hidden_size": 32, "intermediate_size": 64}  # widths that the native kernels group by expert
GROUPS = {"num_experts": 6, "num_expert_group": 3, "topk_group": 2, "num_experts_per_token": 3}


@pytest.fixture(autouse=True)
def _device(cpu_device):
    ms.set_context(mode=ms.PYNATIVE_MODE)
    yield
    ms.set_context(mode=ms.PYNATIVE_MODE)


def route(x, weight, bias, c: MoeConfig):
    """Weights ``[N, E]``, token by token with Python's sort."""
    scores = np_sigmoid(x @ weight.T)
    out = np.zeros_like(scores)
    size = c.num_experts // c.num_expert_group
    for n, ranked in enumerate(scores + bias):
        groups = [list(range(g * size, (g + 1) * size)) for g in range(c.num_expert_group)]
        worth = [sum(sorted((ranked[e] for e in group), reverse=True)[:2]) for group in groups]
        best = sorted(range(len(groups)), key=lambda g: -worth[g])[: c.topk_group]
        chosen = sorted((e for g in best for e in groups[g]), key=lambda e: -ranked[e])[: c.num_experts_per_token]
        out[n, chosen] = scores[n, chosen]
        if c.renormalize:
            out[n] /= out[n].sum()
    return out * c.routed_scaling_factor


def reference(x, w, bias, c: MoeConfig):
    flat = x.reshape(-1, c.hidden_size)
    weights = route(flat, w["gate.weight"], bias, c)
    y = np.zeros_like(flat)
    for e in range(c.num_experts):
        gate, up, down = (w[f"experts.{e}.{name}.weight"] for name in ("w1", "w3", "w2"))
        inner = flat @ gate.T
        y += weights[:, e : e + 1] * ((inner * np_sigmoid(inner) * (flat @ up.T)) @ down.T)
    if c.num_shared_experts:
        gate, up, down = (w[f"shared_experts.{name}_proj.weight"] for name in ("gate", "up", "down"))
        inner = flat @ gate.T
        y += (inner * np_sigmoid(inner) * (flat @ up.T)) @ down.T
    return y.reshape(x.shape)


@pytest.mark.parametrize("mode", [ms.PYNATIVE_MODE, ms.GRAPH_MODE], ids=["pynative", "graph"])
@pytest.mark.parametrize(
    "changes",
    [{}, {"renormalize": False, "num_shared_experts": 0}, {"num_shared_experts": 2, **GROUPS}],
    ids=["plain", "raw scores, none shared", "groups, two shared"],
)
def test_values_and_gradients(changes, mode):
    ms.set_context(mode=mode)
    config = MoeConfig(**(SIZES | changes))
    rng = np.random.default_rng(0)
    layer = SparseMoe(config)
    bias = rng.standard_normal(config.num_experts).astype(np.float32)
    layer.gate.e_score_correction_bias.set_data(Tensor(bias))
    x = rng.standard_normal((2, 4, 5)).astype(np.float32)
    check(layer, lambda x, w: reference(x[0], w, bias.astype(np.float64), config), [x], rng, scale=0.8)


@pytest.mark.parametrize("changes", [{}, GROUPS], ids=["one group", "three groups"])
def test_router_chooses_what_sorting_chooses(changes):
    config = MoeConfig(**(SIZES | changes))
    rng = np.random.default_rng(1)
    router = Router(config)
    weight, x = rng.standard_normal((config.num_experts, 5)), rng.standard_normal((200, 5))
    bias = rng.standard_normal(config.num_experts)
    router.weight.set_data(Tensor(weight.astype(np.float32)))
    router.e_score_correction_bias.set_data(Tensor(bias.astype(np.float32)))
    weights, load = router(Tensor(x.astype(np.float32)))
    want = route(x.astype(np.float32).astype(np.float64), weight.astype(np.float32), bias.astype(np.float32), config)
    assert relative(weights.asnumpy(), want) < 1e-6
    np.testing.assert_array_equal(weights.asnumpy() > 0, want > 0)
    np.testing.assert_allclose(load.asnumpy(), (want > 0).mean(0), atol=1e-6)


def test_bias_only_chooses_and_takes_no_gradient():
    config = MoeConfig(**(SIZES | {"renormalize": False, "routed_scaling_factor": 1.0}))
    rng = np.random.default_rng(2)
    router = Router(config)
    router.weight.set_data(Tensor(rng.standard_normal((4, 5)).astype(np.float32)))
    x = rng.standard_normal((30, 5)).astype(np.float32)
    scores = np_sigmoid(x.astype(np.float64) @ router.weight.asnumpy().astype(np.float64).T)
    router.e_score_correction_bias.set_data(Tensor(np.array([9.0, 0.0, 0.0, 5.0], np.float32)))
    weights = router(Tensor(x))[0].asnumpy()
    want = scores * np.array([1, 0, 0, 1])
    assert relative(weights, want) < 1e-6
    assert "e_score_correction_bias" not in {parameter.name for parameter in router.trainable_params()}


@pytest.mark.parametrize("widths", [{}, WIDE], ids=["narrow", "wide"])
def test_an_expert_that_nobody_chose_has_no_gradient(widths):
    layer = SparseMoe(MoeConfig(**(SIZES | widths), initializer_range=0.5))
    layer.gate.e_score_correction_bias.set_data(Tensor(np.array([9.0, -9.0, 9.0, -9.0], np.float32)))
    x = Tensor(np.random.default_rng(3).standard_normal((2, 4, layer.hidden_size)).astype(np.float32))
    weights = layer.trainable_params()
    gradients = ms.grad(lambda x: layer(x).sum(), None, weights)(x)
    named = {weight.name: gradient.asnumpy() for weight, gradient in zip(weights, gradients, strict=True)}
    for name, gradient in named.items():
        idle = name.startswith(("experts.1.", "experts.3."))
        assert np.all(gradient == 0) if idle else np.any(gradient != 0), name


@pytest.mark.ci
@pytest.mark.parametrize("mode", [ms.PYNATIVE_MODE, ms.GRAPH_MODE], ids=["pynative", "graph"])
def test_experts_that_compute_their_tokens_only_give_what_all_tokens_give(mode):
    if "native" not in backends.available():
        pytest.skip("native is not available")
    ms.set_context(mode=mode)
    config = MoeConfig(**(SIZES | WIDE | {"num_experts": 7, "num_experts_per_token": 3}), initializer_range=0.2)
    x = np.random.default_rng(4).standard_normal((1, 333, 32)).astype(np.float32)
    cotangent = np.random.default_rng(5).standard_normal(x.shape)
    results = []
    layer = SparseMoe(config)
    values = {parameter.name: parameter.asnumpy().astype(np.float64) for parameter in layer.get_parameters()}
    weights = layer.trainable_params()
    for backend in ("native", "composite"):
        with backends.use(backend):
            weighted = Weighted(layer, cotangent)
            of_x, of_weights = ms.grad(weighted, 0, weights)(Tensor(x))
            results.append([layer(Tensor(x)), of_x, *of_weights])
    assert relative(results[0][0].asnumpy(), reference(x.astype(np.float64), values, np.zeros(7), config)) < 1e-6
    for name, got, want in zip(["out", "x", *(weight.name for weight in weights)], *results, strict=True):
        assert relative(got.asnumpy(), want.asnumpy()) < 1e-5, name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": 0}, "num_experts is 0; allowed: an integer >= 1"),
        ({"num_expert_group": 3}, "num_experts is 4; allowed: a multiple of num_expert_group=3"),
        ({"topk_group": 2}, "topk_group is 2; allowed: at most num_expert_group=1"),
        ({"num_experts_per_token": 5}, "num_experts_per_token is 5; allowed: at most 4"),
    ],
)
def test_refusals(changes, message):
    with pytest.raises(ValueError, match=message):
        MoeConfig(**(SIZES | changes))
