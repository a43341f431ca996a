"""MLA against float64 NumPy: values and gradients, packed documents, context parallelism in lockstep, refusals."""

import mindspore as ms
import numpy as np
import pytest
from layer_checks import EPS, check, np_rms, relative
from mindspore import Tensor, nn

from kcp.layers.mla import MlaConfig, MultiLatentAttention
from kcp.parallel import CpGroup, lockstep

SIZES = {"hidden_size": 6, "num_heads": 2, "kv_lora_rank": 5, "qk_nope_head_dim": 3, "qk_rope_head_dim": 2, "v_head_dim": 4}
DOCUMENTS = [None, (0, 3, 3, 4, 9), ((0, 2, 9, 9), (0, 8, 9, 9))]
NAMES = ["one document", "packed", "packed by row"]


@pytest.fixture(autouse=True)
def _device(cpu_device):
    ms.set_context(mode=ms.PYNATIVE_MODE)
    yield
    ms.set_context(mode=ms.PYNATIVE_MODE)


def reference(x, w, documents=None, sizes=None):
    """``[B, T, D] -> [B, T, D]``, token by token: each query sees its own document up to itself."""
    sizes = SIZES if sizes is None else sizes
    heads, rank, nope, rope, value = (sizes[k] for k in ("num_heads", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    batch, tokens, _ = x.shape
    q = (x @ w["q_proj.weight"].T).reshape(batch, tokens, heads, nope + rope)
    latent = x @ w["kv_a_proj_with_mqa.weight"].T
    up = (np_rms(latent[..., :rank]) * w["kv_a_layernorm.weight"]) @ w["kv_b_proj.weight"].T
    up = up.reshape(batch, tokens, heads, nope + value)
    shared = np.repeat(latent[:, :, None, rank:], heads, 2)
    k, v = np.concatenate([up[..., :nope], shared], -1), up[..., nope:]
    out = np.zeros((batch, tokens, heads, value))
    for b in range(batch):
        row = (0, tokens) if documents is None else documents[b] if isinstance(documents[0], tuple) else documents
        for t in range(tokens):
            begin = max(edge for edge in row if edge <= t)
            scores = np.einsum("hd,shd->hs", q[b, t], k[b, begin : t + 1]) * (nope + rope) ** -0.5
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
            out[b, t] = np.einsum("hs,shv->hv", weights, v[b, begin : t + 1])
    return out.reshape(batch, tokens, -1) @ w["o_proj.weight"].T


class WithDocuments(nn.Cell):
    """The layer with its boundaries bound."""

    def __init__(self, layer, documents):
        super().__init__(auto_prefix=False)
        self.layer = layer
        self.documents = documents

    def construct(self, x):
        return self.layer(x, self.documents)


@pytest.mark.parametrize("documents", DOCUMENTS, ids=NAMES)
@pytest.mark.parametrize("mode", [ms.PYNATIVE_MODE, ms.GRAPH_MODE], ids=["pynative", "graph"])
def test_values_and_gradients(documents, mode):
    ms.set_context(mode=mode)
    rng = np.random.default_rng(0)
    layer = MultiLatentAttention(MlaConfig(norm_eps=EPS, **SIZES))
    x = rng.standard_normal((2, 9, 6)).astype(np.float32)
    check(WithDocuments(layer, documents), lambda x, w: reference(x[0], w, documents), [x], rng, scale=0.7)


def test_boundaries_as_a_tensor_are_those_of_the_host():
    rng = np.random.default_rng(1)
    layer = MultiLatentAttention(MlaConfig(**SIZES, initializer_range=0.7))
    x = Tensor(rng.standard_normal((2, 9, 6)).astype(np.float32))
    for documents in DOCUMENTS[1:]:
        want = layer(x, documents).asnumpy()
        np.testing.assert_array_equal(layer(x, Tensor(np.array(documents, np.int32))).asnumpy(), want)


def test_what_another_document_says_changes_nothing():
    rng = np.random.default_rng(2)
    layer = MultiLatentAttention(MlaConfig(**SIZES, initializer_range=0.7))
    x = rng.standard_normal((1, 9, 6)).astype(np.float32)
    other = x.copy()
    other[:, :4] += 5
    first, second = (layer(Tensor(a), (0, 4, 9)).asnumpy() for a in (x, other))
    np.testing.assert_array_equal(first[:, 4:], second[:, 4:])
    assert np.abs(first[:, :4] - second[:, :4]).max() > 0.1


@pytest.mark.parametrize("strength", [1.0, 300.0])
def test_large_scores_stay_finite(strength):
    rng = np.random.default_rng(3)
    layer = MultiLatentAttention(MlaConfig(**SIZES, initializer_range=0.7))
    x = (strength * rng.standard_normal((1, 9, 6))).astype(np.float32)
    w = {p.name: p.asnumpy().astype(np.float64) for p in layer.get_parameters()}
    assert relative(layer(Tensor(x)).asnumpy(), reference(x.astype(np.float64), w)) < 1e-5 * strength


@pytest.mark.parametrize("documents", DOCUMENTS, ids=NAMES)
@pytest.mark.parametrize(
    ("strategy", "lengths", "heads"),
    [("latent_gather", (3, 3, 3), 2), ("latent_gather", (5, 0, 1, 3), 3), ("ulysses", (3, 3, 3), 3), ("ulysses", (7, 2), 4)],
)
def test_ranks_together_give_the_layer_of_one(strategy, lengths, heads, documents):
    rng = np.random.default_rng(4)
    sizes = SIZES | {"num_heads": heads}
    x = rng.standard_normal((2, sum(lengths), 6)).astype(np.float32)
    alone = MultiLatentAttention(MlaConfig(**sizes, initializer_range=0.7))
    w = {p.name: p.asnumpy() for p in alone.get_parameters()}

    def rank(group):
        layer = MultiLatentAttention(MlaConfig(strategy=strategy, **sizes), group)
        for parameter in layer.get_parameters():
            parameter.set_data(Tensor(w[parameter.name]))
        begin, end = group.slice_bounds(sum(lengths))
        return layer(Tensor(x[:, begin:end]), documents).asnumpy()

    got = np.concatenate(lockstep.run(len(lengths), rank, lengths), 1)
    want = reference(x.astype(np.float64), {name: value.astype(np.float64) for name, value in w.items()}, documents, sizes)
    assert relative(got, want) < 1e-6


@pytest.mark.parametrize(
    ("changes", "ranks", "message"),
    [
        ({"strategy": "none"}, 2, "strategy is 'none' with a group of 2 ranks; allowed: 'ulysses' or 'latent_gather'"),
        ({"strategy": "ulysses"}, 3, "num_heads"),
        ({"strategy": "ring"}, 1, "strategy is 'ring'; allowed: 'none', 'ulysses', 'latent_gather'"),
        ({"kv_lora_rank": 0}, 1, "kv_lora_rank is 0; allowed: an integer >= 1"),
        ({"v_head_dim": True}, 1, "v_head_dim is True; allowed: an integer >= 1"),
    ],
)
def test_refusals(changes, ranks, message):
    with pytest.raises(ValueError, match=message):
        MultiLatentAttention(MlaConfig(**(SIZES | changes)), CpGroup(0, ranks) if ranks > 1 else None)
