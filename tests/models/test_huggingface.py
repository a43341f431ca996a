"""Hugging Face checkpoints as kcp models: what transformers computes, and what a folder says of itself."""

import json

import mindspore as ms
import numpy as np
import pytest
from hf_cases import (
    RELEASED,
    TINY,
    check_golden,
    golden_folder,
    golden_results,
    random_tensors,
    shapes_of_tiny,
    shifted_labels,
    write_checkpoint,
)  # fmt: skip
from mindspore import Tensor, ops

from kcp.hf import CheckpointError, expected_shapes, model_options_from_json, model_options_to_json
from kcp.models import KimiLinearConfig, KimiLinearForCausalLM, load_hf
from kcp.models.kimi_linear import config_from_hf, config_to_hf


@pytest.fixture(autouse=True)
def _device(cpu_device):
    ms.set_context(mode=ms.PYNATIVE_MODE)
    return cpu_device


def test_golden_checkpoint_gives_the_logits_loss_and_gradients_of_transformers():
    model = load_hf(golden_folder(), seq_length=150)
    ids = golden_results()["input_ids"].astype(np.int32)
    labels = shifted_labels(ids)
    inputs = Tensor(ids), Tensor(labels), Tensor((labels >= 0).astype(np.int32))
    weights = model.trainable_params()
    (total, count), gradients = ops.value_and_grad(model, None, weights, has_aux=True)(*inputs)
    named = {weight.name: gradient.asnumpy() / float(count) for weight, gradient in zip(weights, gradients, strict=True)}
    check_golden(model.logits(inputs[0]).asnumpy(), float(total) / float(count), named)


def test_golden_config_survives_both_spellings():
    content = json.loads((golden_folder() / "config.json").read_text())
    options, unused = model_options_from_json(content)
    assert unused == ()
    for spelling in ("transformers5", "linear_attn_config"):
        written = model_options_to_json(options, "float32", spelling)
        assert model_options_from_json(written) == (options, ())
    same = {key: content[key] for key in written.keys() & content.keys()}
    assert {key: written[key] for key in same} == same


def test_released_config_in_its_own_spelling():
    options, unused = model_options_from_json(RELEASED)
    assert unused == ()
    assert [i for i, kind in enumerate(options["layer_types"]) if kind == "full_attention"] == [3, 7, 11, 15, 19, 23, 26]
    assert options["mlp_layer_types"] == ["dense"] + ["sparse"] * 26
    assert (options["linear_num_heads"], options["linear_head_dim"], options["linear_conv_kernel_dim"]) == (32, 128, 4)
    written = model_options_to_json(options, "bfloat16", "linear_attn_config")
    assert {key: value for key, value in written.items() if key in RELEASED} == RELEASED
    modern = model_options_to_json(options, "bfloat16")
    assert "linear_attn_config" not in modern and model_options_from_json(modern) == (options, ())
    shapes = expected_shapes(options)
    assert sum(int(np.prod(shape)) for shape in shapes.values()) == pytest.approx(48.9e9, rel=0.01)


def test_shapes_on_disk_are_the_models():
    config = config_from_hf(TINY, seq_length=16)
    model = KimiLinearForCausalLM(config)
    shapes = {parameter.name: tuple(parameter.shape) for parameter in model.get_parameters()}
    assert shapes == shapes_of_tiny() == expected_shapes(model_options_from_json(TINY)[0])
    assert config_from_hf(config_to_hf(config, spelling="linear_attn_config")).layer_types == config.layer_types
    sizes = {"linear_num_value_heads": 4, "linear_value_head_dim": 6, "num_shared_experts": 0, "tie_word_embeddings": True}
    options = model_options_from_json(TINY)[0] | sizes
    model = KimiLinearForCausalLM(KimiLinearConfig(seq_length=16, **options))
    assert {parameter.name: tuple(parameter.shape) for parameter in model.get_parameters()} == expected_shapes(options)


@pytest.mark.parametrize("bf16", [False, True])
def test_loaded_parameters_are_the_files(tmp_path, bf16):
    tensors = random_tensors(bf16=bf16)
    folder = write_checkpoint(tmp_path / "hf", tensors, shards=3)
    model = load_hf(folder, seq_length=12)
    for parameter in model.get_parameters():
        dtype, shape, raw = tensors[parameter.name]
        values = np.frombuffer(raw, np.uint16).astype(np.uint32) << 16 if dtype == "BF16" else np.frombuffer(raw, np.uint32)
        np.testing.assert_array_equal(parameter.asnumpy().view(np.uint32), values.astype(np.uint32).reshape(shape))
    logits = model.logits(Tensor(np.arange(24).reshape(2, 12) % 23, ms.int32)).asnumpy()
    assert logits.shape == (2, 12, 23) and np.all(np.isfinite(logits))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": None}, "config.json.hidden_size: missing"),
        ({"hidden_size": "16"}, "config.json.hidden_size = '16': an integer from 1 to"),
        ({"num_hidden_layers": 10**12}, "config.json.num_hidden_layers = 1000000000000: an integer from 1 to"),
        ({"hidden_act": "gelu"}, "config.json.hidden_act = 'gelu': only 'silu' is supported"),
        ({"q_lora_rank": 8}, "config.json.q_lora_rank = 8: only None is supported"),
        ({"model_type": "llama"}, "config.json.model_type = 'llama': only 'kimi_linear'"),
        ({"moe_router_activation_func": "softmax"}, "only 'sigmoid' is supported"),
        ({"num_key_value_heads": 1}, "config.json.num_key_value_heads = 1: num_attention_heads = 2 is needed"),
        ({"layer_types": ["linear_attention"]}, "config.json.layer_types = '1 entries': 2 entries are needed"),
        ({"layer_types": ["linear_attention", "mamba"]}, "config.json.layer_types = 'mamba': one of linear_attention, full_attention"),
        ({"layer_types": None}, "config.json.layer_types: missing, and linear_attn_config too"),
        ({"kv_lora_rank": None}, "config.json.kv_lora_rank: missing"),
        ({"first_k_dense_replace": 0}, "first_k_dense_replace and moe_layer_freq say"),
        ({"num_expert_group": 2, "use_grouped_topk": False}, "config.json.use_grouped_topk = False: True is needed"),
        ({"linear_attn_config": []}, "config.json.linear_attn_config = []: a mapping"),
    ],
)
def test_config_faults_are_one_line_each(changes, message):
    with pytest.raises(CheckpointError) as error:
        model_options_from_json(TINY | changes)
    assert any(message in line for line in error.value.problems)
    assert all("\n" not in line for line in error.value.problems)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kda_layers": [0, 1]}, "kda_layers = [0, 1]: a list of layer numbers from 1 to 2"),
        ({"kda_layers": [1, 2]}, "full_attn_layers = 2: each layer is named once"),
        ({"kda_layers": []}, "layers [1] are in neither kda_layers nor full_attn_layers"),
        ({"kda_layers": [True]}, "a list of layer numbers"),
        ({"num_heads": 3}, "config.json.linear_num_heads = 2: linear_attn_config says 3"),
        ({"gate_lower_bound": -5.0}, "linear_attn_config.gate_lower_bound = -5.0: not supported"),
        ({"short_conv_kernel_size": None}, "linear_attn_config.short_conv_kernel_size: missing"),
    ],
)
def test_faults_of_the_nested_spelling(changes, message):
    nested = {"kda_layers": [1], "full_attn_layers": [2], "num_heads": 2, "head_dim": 8, "short_conv_kernel_size": 4}
    assert model_options_from_json(TINY | {"linear_attn_config": nested}) == model_options_from_json(TINY)
    with pytest.raises(CheckpointError) as error:
        model_options_from_json(TINY | {"linear_attn_config": nested | changes})
    assert any(message in line for line in error.value.problems), error.value.problems


def test_keys_that_kcp_does_not_know_are_named():
    assert model_options_from_json(TINY | {"new_feature": 3, "other": None})[1] == ("new_feature",)
    with pytest.warns(UserWarning, match="new_feature"):
        config_from_hf(TINY | {"new_feature": 3})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kda_safe_gate": True}, "kda_safe_gate = True: Hugging Face's kimi_linear has only the softplus gate"),
        ({"kda_allow_neg_eigval": True}, "kda_allow_neg_eigval = True"),
        ({"linear_num_value_heads": 4}, "linear_num_value_heads = 4: Hugging Face's kimi_linear has only linear_num_heads = 2"),
    ],
)
def test_what_hugging_face_can_not_say_is_refused(changes, message):
    with pytest.raises(CheckpointError, match=message):
        model_options_to_json(model_options_from_json(TINY)[0] | changes, "float32")


def test_interleaved_dense_layers_have_one_spelling_only():
    options = model_options_from_json(TINY | {"mlp_layer_types": ["sparse", "dense"]})[0]
    assert model_options_from_json(model_options_to_json(options, "float32"))[0] == options
    with pytest.raises(CheckpointError, match="need the spelling transformers5"):
        model_options_to_json(options, "float32", "linear_attn_config")
