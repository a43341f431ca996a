"""MindFormers' stock GPTModel with KDA and MLA layers: causal, trained for some steps in graph mode, refusals."""

import mindspore as ms
import numpy as np
import pytest
from mindformers.core.context import build_context
from mindspore import Tensor, nn, ops

from kcp.layers.kda_attention import KdaAttention, KdaAttentionConfig
from kcp.layers.mla import MlaConfig
from kcp.models.mcore import KdaSelfAttention, MlaSelfAttention, hybrid_block_spec, use_gather_embedding

HIDDEN, LENGTH, VOCABULARY = 32, 24, 19
KDA = KdaAttentionConfig(hidden_size=HIDDEN, num_heads=2, head_dim=8, chunk_size=16)
MLA = MlaConfig(HIDDEN, num_heads=2, kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8)
LAYERS = ["linear_attention", "full_attention", "linear_attention"]


@pytest.fixture(autouse=True)
def _device(cpu_device):
    ms.set_seed(3)
    np.random.seed(3)
    yield
    ms.set_context(mode=ms.PYNATIVE_MODE)


def transformer_config(layers=3):
    from mindformers.parallel_core.transformer_config import TransformerConfig

    return TransformerConfig(
        num_layers=layers, hidden_size=HIDDEN, num_attention_heads=2, ffn_hidden_size=48, seq_length=LENGTH, vocab_size=VOCABULARY,
        use_flash_attention=False, fused_norm=False, hidden_dropout=0.0, attention_dropout=0.0, add_bias_linear=False,
        position_embedding_type="none", gated_linear_unit=True, hidden_act="silu", normalization="RMSNorm",
        compute_dtype="float32", params_dtype="float32", layernorm_compute_dtype="float32", softmax_compute_dtype="float32",
        rotary_dtype="float32", add_qkv_bias=False, use_contiguous_weight_layout_attention=False,
    )  # fmt: skip


def build():
    from mindformers.parallel_core.training_graph.base_models.gpt.gpt_model import GPTModel

    config = transformer_config()
    model = GPTModel(config, hybrid_block_spec(config, LAYERS, KDA, MLA), VOCABULARY, LENGTH, position_embedding_type="none")
    use_gather_embedding(model)
    return model


@pytest.mark.ci
def test_stock_gpt_model_trains_with_kda_and_mla_layers():
    build_context({"use_legacy": False, "use_parallel": False, "context": {"mode": 0, "device_target": "CPU"}})
    ms.set_context(mode=ms.GRAPH_MODE, jit_config={"jit_level": "O0"})
    model = build()
    kinds = [type(layer.self_attention) for layer in model.decoder.layers]
    assert kinds == [KdaSelfAttention, MlaSelfAttention, KdaSelfAttention]
    names = {parameter.name for parameter in model.trainable_params()}
    assert {f"decoder.layers.{layer}.self_attention.attention.A_log" for layer in (0, 2)} <= names
    rng = np.random.default_rng(0)
    ids = ((rng.integers(VOCABULARY, size=(4, 1)) + 2 * np.arange(LENGTH + 1)) % VOCABULARY).astype(np.int32)

    # earlier logits do not depend on later tokens
    model.set_train(False)
    first = model(Tensor(ids[:, :-1])).asnumpy().reshape(4, LENGTH, VOCABULARY)
    changed = ids[:, :-1].copy()
    changed[:, 15:] = (changed[:, 15:] + 3) % VOCABULARY
    second = model(Tensor(changed)).asnumpy().reshape(4, LENGTH, VOCABULARY)
    np.testing.assert_allclose(second[:, :15], first[:, :15], rtol=1e-5, atol=1e-6)
    assert np.abs(second[:, 15:] - first[:, 15:]).max() > 1e-3

    class Loss(nn.Cell):
        def __init__(self):
            super().__init__()
            self.model = model

        def construct(self, ids, labels):
            return self.model(ids, labels=labels, loss_mask=ops.ones(ids.shape, ms.float32))[0].sum()

    model.set_train(True)
    network = Loss()
    optimizer = nn.Adam(network.trainable_params(), 1e-2)
    step = nn.TrainOneStepCell(network, optimizer)
    inputs = Tensor(ids[:, :-1]), Tensor(ids[:, 1:])
    losses = [float(step(*inputs)) for _ in range(25)]
    assert losses[0] == pytest.approx(np.log(VOCABULARY), rel=0.1)
    assert losses[-1] < 0.5 * losses[0]


def test_sequence_major_attention_is_the_layer_transposed():
    config = transformer_config()
    cell = KdaSelfAttention(config, kda=KDA)
    x = np.random.default_rng(1).standard_normal((LENGTH, 2, HIDDEN)).astype(np.float32)
    out, bias = cell(Tensor(x), attention_mask=None)
    assert bias is None and isinstance(cell.attention, KdaAttention)
    want = cell.attention(Tensor(x.transpose(1, 0, 2))).asnumpy()
    np.testing.assert_array_equal(out.asnumpy(), want.transpose(1, 0, 2))


def test_refusals():
    config = transformer_config()
    with pytest.raises(ValueError, match="hidden_size is 16; allowed: 32"):
        KdaSelfAttention(config, kda=KdaAttentionConfig(hidden_size=16, num_heads=2, head_dim=8))
    with pytest.raises(ValueError, match="layer_types has 2 entries; allowed: 3"):
        hybrid_block_spec(config, LAYERS[:2], KDA, MLA)
    with pytest.raises(ValueError, match=r"layer_types\[2\] is 'window'"):
        hybrid_block_spec(config, LAYERS[:2] + ["window"], KDA, MLA)
