"""Health figures against a float64 recurrence, the balance of experts against a count, random numbers in and out."""

import json
import random
from types import SimpleNamespace

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor

from kcp.gauges import Health, combine
from kcp.layers.kda_health import FIGURES
from kcp.ops import backends
from kcp.ops.reference import kda_reference, sigmoid, softplus

B, T, H, K, V = 2, 40, 2, 8, 6


@pytest.mark.parametrize("backend", ["composite", "native"])
@pytest.mark.parametrize("rate", [1.0, 12.0])
def test_figures_of_a_layer_are_those_of_the_recurrence(cpu_device, backend, rate):
    from kcp.layers.kda_core import KdaCore, KdaCoreConfig
    from kcp.layers.kda_health import HealthMeter

    ms.set_context(mode=ms.PYNATIVE_MODE)
    rng = np.random.default_rng(5)
    q, k = (rng.normal(size=(B, T, H, K)).astype(np.float32) for _ in range(2))
    v, gate = (rng.normal(size=(B, T, H, V)).astype(np.float32) for _ in range(2))
    g, beta = rng.normal(size=(B, T, H, K)).astype(np.float32), rng.normal(size=(B, T, H)).astype(np.float32)
    # One head forgets within the slice at the higher rate, the other never does.
    a_log = np.log(np.float32([0.05 * rate**2, 0.001]))
    bias = rng.normal(size=(H, K)).astype(np.float32)
    with backends.use(backend):
        core = KdaCore(KdaCoreConfig(H, head_dim=K, v_head_dim=V, chunk_size=16))
        meter = HealthMeter(core.config, core.local_options(True, True))
        tensors = (Tensor(x) for x in (q, k, v, g, beta, a_log, bias.reshape(-1), gate))
        got = dict(zip(FIGURES, meter.measure(*tensors).asnumpy().tolist(), strict=True))
    decay = -np.exp(a_log.astype(np.float64))[:, None] * softplus(g.astype(np.float64) + bias)
    options = {
        "a_log": a_log,
        "dt_bias": bias,
        "use_gate_in_kernel": True,
        "use_qk_l2norm_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
    }
    state = kda_reference(q, k, v, g, beta, **options).final_state
    # The transition: the states that basis states become where nothing is written.
    basis = np.broadcast_to(np.eye(K), (B, H, K, K))
    nothing = np.zeros((B, T, H, K), np.float32)
    transition = kda_reference(q, k, nothing, g, beta, initial_state=basis, **options).final_state
    vanished = np.abs(transition).max((-2, -1)) < 1e-6
    want = {
        "log_decay_mean": decay.mean(),
        "log_decay_min": decay.min(),
        "log_decay_max": decay.max(),
        "beta_mean": sigmoid(beta.astype(np.float64)).mean(),
        "output_gate_mean": sigmoid(gate.astype(np.float64)).mean(),
        "state_norm": np.sqrt((state**2).sum((-2, -1))).mean(),
        "vanished_heads": vanished.mean(),
    }
    assert want["vanished_heads"] == (0.5 if rate > 1 else 0.0)
    for name, value in want.items():
        assert got[name] == pytest.approx(value, rel=1e-5), name


def test_ranks_are_combined_by_mean_and_extremes():
    figures = np.array([[[-1, -3, -0.5, 0.2, 0.4, 1.0, 0.0]], [[-2, -5, -0.1, 0.4, 0.6, 3.0, 0.5]]], np.float32)
    assert combine(figures) == [
        {
            "log_decay_mean": -1.5, "log_decay_min": -5.0, "log_decay_max": -0.1, "beta_mean": 0.3, "output_gate_mean": 0.5,
            "state_norm": 2.0, "vanished_heads": 0.25,
        }
    ]  # fmt: skip
    assert combine(figures * np.nan)[0]["state_norm"] is None


def test_balance_of_experts_is_counted(cpu_device):
    from kcp.models import KimiLinearConfig, KimiLinearForCausalLM

    ms.set_context(mode=ms.PYNATIVE_MODE)
    kinds = ["linear_attention", "full_attention", "linear_attention"]
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "linear_num_heads": 2, "linear_head_dim": 8}
    sizes |= {"num_attention_heads": 2, "kv_lora_rank": 6, "qk_nope_head_dim": 5, "qk_rope_head_dim": 3, "v_head_dim": 4}
    sizes |= {"num_experts": 4, "num_experts_per_token": 2, "moe_intermediate_size": 10, "seq_length": 32, "kda_chunk_size": 16}
    config = KimiLinearConfig(vocab_size=23, layer_types=kinds, mlp_layer_types=["dense", "sparse", "sparse"], **sizes)
    model = KimiLinearForCausalLM(config)
    # Every token of layer 2 goes to experts 0 and 3.
    model.model.layers[2].block_sparse_moe.gate.e_score_correction_bias.set_data(Tensor(np.float32([9, 0, 0, 9])))
    ids = np.random.default_rng(1).integers(0, 23, (2, 32)).astype(np.int32)
    gauge = Health(every_steps=3, parts=2)
    params = SimpleNamespace(
        train_network=SimpleNamespace(network=model),
        train_dataset_element=(Tensor(ids), Tensor(ids), Tensor(np.ones((2, 32), np.int32)), Tensor(np.int32([[0, 32], [0, 32]]))),
    )
    gauge.begin(params)
    assert gauge.measure(2, params) == ({}, "")
    record, remark = gauge.measure(3, params)
    assert list(record["health"]) == ["layer_0", "layer_2"] and list(record["health"]["layer_0"]) == list(FIGURES)
    assert list(record["moe"]) == ["layer_1", "layer_2"]
    assert record["moe"]["layer_2"]["max_over_mean"] == 2.0 and 1.0 <= record["moe"]["layer_1"]["max_over_mean"] <= 2.0
    # Layer 2's bias of 9 keeps the chosen far from the others; without one, scores differ by what the weights give.
    assert 8.0 < record["moe"]["layer_2"]["router_margin"] < 10.0 and 0.0 <= record["moe"]["layer_1"]["router_margin"] < 0.1
    assert remark == "  experts 2.00 max/mean"


def test_random_numbers_go_on_where_the_state_was_taken():
    from kcp.checkpoint_callbacks import random_state, set_random_state

    random.seed(3)
    np.random.seed(4)
    ms.manual_seed(5)
    np.random.normal()
    state = json.loads(json.dumps(random_state()))
    want = random.random(), np.random.normal(size=3).tolist(), ms.get_rng_state().asnumpy().tolist()
    ms.manual_seed(6)
    assert ms.get_rng_state().asnumpy().tolist() != want[2]
    set_random_state(state)
    assert (random.random(), np.random.normal(size=3).tolist(), ms.get_rng_state().asnumpy().tolist()) == want
