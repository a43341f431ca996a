"""The Kimi-Linear model: names on disk, loss and gradients, refusals."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, ops

from kcp.models import KimiLinearConfig, KimiLinearForCausalLM

SIZES = {
    "vocab_size": 23,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "linear_num_heads": 2,
    "linear_head_dim": 8,
    "seq_length": 20,
    "kda_chunk_size": 16,
    "initializer_range": 0.2,
}

# Names and shapes on disk of a Hugging Face kimi_linear checkpoint whose layers are KDA with a dense feed-forward;
# D hidden, I intermediate, P heads * head dim, K head dim, H heads, V vocabulary.
LAYER = {
    "input_layernorm.weight": "D",
    "post_attention_layernorm.weight": "D",
    "block_sparse_moe.gate_proj.weight": "ID",
    "block_sparse_moe.up_proj.weight": "ID",
    "block_sparse_moe.down_proj.weight": "DI",
    "self_attn.A_log": "11H1",
    "self_attn.dt_bias": "P",
    "self_attn.b_proj.weight": "HD",
    "self_attn.f_a_proj.weight": "KD",
    "self_attn.f_b_proj.weight": "PK",
    "self_attn.g_a_proj.weight": "KD",
    "self_attn.g_b_proj.weight": "PK",
    "self_attn.k_conv1d.weight": "P14",
    "self_attn.q_conv1d.weight": "P14",
    "self_attn.v_conv1d.weight": "P14",
    "self_attn.k_proj.weight": "PD",
    "self_attn.q_proj.weight": "PD",
    "self_attn.v_proj.weight": "PD",
    "self_attn.o_norm.weight": "K",
    "self_attn.o_proj.weight": "DP",
}
WHOLE = {"model.embed_tokens.weight": "VD", "model.norm.weight": "D", "lm_head.weight": "VD"}
LETTERS = {"D": 16, "I": 24, "P": 16, "K": 8, "H": 2, "V": 23, "1": 1, "4": 4}


@pytest.fixture(autouse=True)
def cpu():
    ms.set_device("CPU")
    ms.runtime.launch_blocking()
    ms.set_context(mode=ms.PYNATIVE_MODE)
    ms.set_seed(1)
    yield
    ms.set_context(mode=ms.PYNATIVE_MODE)


def build(**options) -> KimiLinearForCausalLM:
    return KimiLinearForCausalLM(KimiLinearConfig(**(SIZES | options)))


def batch(seed=0):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, SIZES["vocab_size"], (2, SIZES["seq_length"] + 1)).astype(np.int32)
    mask = (rng.random((2, SIZES["seq_length"])) > 0.2).astype(np.int32)
    labels = np.where(rng.random(mask.shape) > 0.1, tokens[:, 1:], -100).astype(np.int32)
    return Tensor(tokens[:, :-1]), Tensor(labels), Tensor(mask)


def test_parameters_are_named_and_shaped_as_on_disk():
    expected = {f"model.layers.{layer}.{name}": shape for layer in range(2) for name, shape in LAYER.items()} | WHOLE
    expected = {name: tuple(LETTERS[letter] for letter in shape) for name, shape in expected.items()}
    assert {parameter.name: tuple(parameter.shape) for parameter in build().get_parameters()} == expected


@pytest.mark.parametrize("tied", [False, True])
def test_loss_is_the_cross_entropy_of_the_valid_tokens(tied):
    network = build(tie_word_embeddings=tied)
    input_ids, labels, mask = batch()
    logits = network.logits(input_ids).asnumpy().astype(np.float64)
    assert logits.shape == (2, SIZES["seq_length"], SIZES["vocab_size"])
    loss, count = network(input_ids, labels, mask)
    valid = (labels.asnumpy() >= 0) & (mask.asnumpy() != 0)
    assert int(count) == valid.sum() > 0
    log_softmax = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    picked = np.take_along_axis(log_softmax, np.maximum(labels.asnumpy(), 0)[..., None], -1)[..., 0]
    assert float(loss) == pytest.approx(-(picked * valid).sum(), rel=2e-6)


def test_tied_output_is_the_embedding_table():
    network = build(tie_word_embeddings=True)
    assert "lm_head.weight" not in {parameter.name for parameter in network.get_parameters()}
    input_ids, _, _ = batch()
    hidden = network.model(input_ids).asnumpy()
    want = hidden @ network.model.embed_tokens.weight.asnumpy().T
    np.testing.assert_allclose(network.logits(input_ids).asnumpy(), want, rtol=1e-5, atol=1e-5)


def gradients(network, inputs):
    weights = network.trainable_params()
    return ops.value_and_grad(network, None, weights, has_aux=True)(*inputs)[1]


def slope_along(network, inputs, weight, direction, step):
    """Derivative of the loss along ``direction`` at 0: central differences, extrapolated from two steps."""
    value, quotients = weight.asnumpy(), []
    for size in (step, step / 2):
        ends = []
        for sign in (1, -1):
            weight.set_data(Tensor((value + sign * size * direction).astype(np.float32)))
            ends.append(float(network(*inputs)[0]))
        quotients.append((ends[0] - ends[1]) / (2 * size))
    weight.set_data(Tensor(value))
    return (4 * quotients[1] - quotients[0]) / 3


@pytest.mark.parametrize("tied", [False, True])
def test_gradient_along_a_random_direction_equals_the_difference_quotient(tied):
    network, inputs = build(tie_word_embeddings=tied, num_hidden_layers=1), batch()
    weights = network.trainable_params()
    slopes = gradients(network, inputs)
    rng = np.random.default_rng(3)
    for weight, slope in zip(weights, slopes, strict=True):
        if tied and "embed_tokens" not in weight.name:
            continue
        slope = slope.asnumpy().astype(np.float64)
        # Along the gradient plus a random direction: far from zero, and not blind to a wrong part.
        direction = slope / np.linalg.norm(slope) + 0.5 * rng.normal(size=slope.shape) / np.sqrt(slope.size)
        got = slope_along(network, inputs, weight, direction, 2e-3)
        assert got == pytest.approx((slope * direction).sum(), rel=3e-3, abs=3e-2), weight.name


@pytest.mark.ci
def test_graph_mode_equals_pynative():
    network, inputs = build(), batch()
    network.set_train()
    eager = [gradient.asnumpy() for gradient in gradients(network, inputs)]
    loss = float(network(*inputs)[0])
    ms.set_context(mode=ms.GRAPH_MODE)
    assert float(network(*inputs)[0]) == pytest.approx(loss, rel=1e-6)
    for weight, got, want in zip(network.trainable_params(), gradients(network, inputs), eager, strict=True):
        error = np.linalg.norm(got.asnumpy() - want) / np.linalg.norm(want)
        assert error < 1e-5, weight.name


def test_later_tokens_do_not_change_earlier_logits():
    network = build()
    tokens = batch()[0].asnumpy()
    changed = tokens.copy()
    changed[:, 12:] = (changed[:, 12:] + 5) % SIZES["vocab_size"]
    first, second = (network.logits(Tensor(ids)).asnumpy() for ids in (tokens, changed))
    np.testing.assert_allclose(second[:, :12], first[:, :12], rtol=1e-6, atol=1e-6)
    assert np.abs(second[:, 12:] - first[:, 12:]).max() > 1e-3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layer_types": ["linear_attention", "sliding"]}, r"layer_types\[1\]: 'sliding' .*'linear_attention' or 'full_attention'"),
        ({"layer_types": ["linear_attention"]}, "layer_types: .*num_hidden_layers = 2 entries"),
        ({"mlp_layer_types": ["dense", "wide"]}, r"mlp_layer_types\[1\]: 'wide' .*'dense' or 'sparse'"),
        ({"mlp_layer_types": ["dense", "sparse"]}, "num_experts: None .* sparse layers"),
        ({"num_experts": 8}, "num_experts: 8 .* mlp_layer_types"),
        ({"compute_dtype": "float8"}, "compute_dtype: 'float8' .* float32, float16, bfloat16"),
        ({"context_parallel_size": 2}, "kda_cp_strategy: 'none' .* one of ulysses, state_scan, ptp_chain"),
        ({"context_parallel_size": 3, "kda_cp_strategy": "ulysses"}, "seq_length: 20 .* multiple of"),
    ],
)
def test_what_is_not_in_this_release_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        KimiLinearConfig(**(SIZES | options))


def test_more_context_parallel_ranks_than_launched_are_refused():
    with pytest.raises(ValueError, match="context_parallel_size: 2 .* launch has 1"):
        build(context_parallel_size=2, kda_cp_strategy="ulysses")


def test_registered_with_mindformers():
    from mindformers.tools.register import MindFormerModuleType, MindFormerRegister

    registry = MindFormerRegister.registry
    assert registry[MindFormerModuleType.MODELS]["mcore_KimiLinearForCausalLM"] is KimiLinearForCausalLM
    assert registry[MindFormerModuleType.CONFIG]["mcore_KimiLinearConfig"] is KimiLinearConfig
