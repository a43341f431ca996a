"""KDA as a self-attention of MindFormers' PyNative layers, and under Hyper-Parallel's ContextParallel (a stand-in for it)."""

from __future__ import annotations

import importlib
import sys
import types
from types import SimpleNamespace

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn
from mindspore.common import _no_grad

from kcp.layers import KdaCore, KdaCoreConfig
from kcp.layers.hyper_parallel import LocalHeads, OwnUlysses, context_parallel_core, find_context_parallel
from kcp.layers.kda_attention import KdaAttention
from kcp.layers.pynative_attention import (
    PynativeKdaSelfAttention,
    PynativeKdaSelfAttentionSubmodules,
    attention_config,
    parallelize_kda_self_attention,
)
from kcp.parallel import CpGroup, lockstep
from kcp.parallel.ulysses import heads_to_sequence, sequence_to_heads

CONFIG = {
    "hidden_size": 24, "num_attention_heads": 2, "kv_channels": 8, "layernorm_epsilon": 1e-5, "init_method_std": 0.1,
    "kda_safe_gate": True, "compute_dtype": ms.float32, "params_dtype": ms.float32, "hidden_dropout": 0.0,
    "apply_residual_connection_post_layernorm": False, "layernorm_compute_dtype": ms.float32,
}  # fmt: skip


def module(**changes) -> PynativeKdaSelfAttention:
    return PynativeKdaSelfAttention(SimpleNamespace(**{**CONFIG, **changes}), PynativeKdaSelfAttentionSubmodules(), layer_number=3)


def hidden(tokens=21, batch=2, seed=0) -> Tensor:
    return Tensor(np.random.default_rng(seed).standard_normal((tokens, batch, 24)).astype(np.float32))


def test_sequence_first_in_and_out():
    """The numbers of KdaAttention, transposed."""
    layer, x = module(), hidden()
    out = layer(x, attention_mask=None, rotary_pos_emb=Tensor(np.zeros(3, np.float32)))
    want = layer.attention(x.swapaxes(0, 1)).asnumpy()
    assert out.dtype == x.dtype
    assert np.array_equal(out.asnumpy(), np.swapaxes(want, 0, 1))
    grads = ms.grad(lambda x: layer(x).sum(), 0, tuple(layer.trainable_params()))(x)[1]
    assert len(grads) == 15 and all(np.any(g.asnumpy()) for g in grads)


def test_packed_documents_by_their_ends():
    layer, x = module(), hidden(batch=1)
    whole = layer(x, actual_seq_len=[5, 21]).asnumpy()
    assert np.allclose(whole, layer(x, actual_seq_len=Tensor([5, 21], ms.int32)).asnumpy(), atol=1e-6)
    assert np.allclose(whole[5:], layer(x[5:]).asnumpy(), atol=1e-6)
    with pytest.raises(ValueError, match="^actual_seq_len is given with B=2; allowed: B=1"):
        layer(hidden(), actual_seq_len=[21])


@pytest.mark.parametrize("name", ["key_value_states", "prefix_keys_values"])
def test_what_kda_has_not_is_refused(name):
    with pytest.raises(ValueError, match=f"^{name} is given; allowed: None"):
        module()(hidden(), **{name: hidden()})


def test_configuration_by_other_names():
    config = SimpleNamespace(hidden_size=24, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, kv_channels=64)
    found = attention_config(config)
    assert (found.num_heads, found.num_v_heads, found.head_dim) == (2, 4, 8)
    with pytest.raises(ValueError, match="^config has none of linear_num_key_heads, linear_num_heads, num_attention_heads"):
        attention_config(SimpleNamespace(hidden_size=24, kv_channels=8))


def test_reset_parameter():
    layer = module()
    before = {p.name: p.asnumpy().copy() for p in layer.get_parameters()}
    layer.reset_parameter()
    after = {p.name: p for p in layer.get_parameters()}
    assert before.keys() == after.keys()
    assert not np.array_equal(before["attention.q_proj.weight"], after["attention.q_proj.weight"].asnumpy())
    assert abs(float(after["attention.o_proj.weight"].asnumpy().std()) - 0.1) < 0.02
    assert np.array_equal(after["attention.o_norm.weight"].asnumpy(), np.ones(8, np.float32))


@pytest.mark.ci
def test_in_mindformers_own_transformer_layer():
    """The layer of the installed MindFormers builds it by its specification and calls it."""
    layers = importlib.import_module("mindformers.pynative.transformers.transformer_layer")
    specs = importlib.import_module("mindformers.parallel_core.utils.spec_utils")
    attention = specs.ModuleSpec(module=PynativeKdaSelfAttention, submodules=PynativeKdaSelfAttentionSubmodules())
    submodules = layers.TransformerLayerSubmodules(self_attention=attention)  # without norms, the identity for an MLP
    layer = layers.TransformerLayer(SimpleNamespace(**CONFIG), submodules, layer_number=1)
    layer.hidden_states_dropout = nn.Identity()  # its operator has no CPU kernel
    x = hidden()
    out = layer(x)[0].asnumpy()
    kda = layer.self_attention.attention(x.swapaxes(0, 1)).asnumpy().swapaxes(0, 1)
    assert np.allclose(out, 2.0 * (x.asnumpy() + kda), atol=1e-6)


def test_a_module_specification_of_the_attention():
    spec = SimpleNamespace(module=KdaAttention, params={})
    layer = PynativeKdaSelfAttention(SimpleNamespace(**CONFIG), PynativeKdaSelfAttentionSubmodules(attention=spec))
    assert isinstance(layer.attention, KdaAttention)


# ---- context parallelism


class _DTensor:
    """A distributed tensor as Hyper-Parallel's hooks hand it over."""

    def __init__(self, local):
        self.local, self.shape = local, local.shape

    def to_local(self):
        return self.local


class _Mesh:
    """A mesh that knows its ranks; the stand-in exchanges over ``group``."""

    def __init__(self, group):
        self.group, self.rank_list = group, tuple(range(group.size))


class _ContextParallel:
    """The interface of Hyper-Parallel's ContextParallel: hooks that exchange the named positional inputs, and the output back."""

    def __init__(self, seq_dim=1, head_dim=2, ulysses_degree=None, qkv_indices=(0, 1, 2), qkv_kwarg_names=(), load_balance=False):
        assert (seq_dim, head_dim) == (1, 2)
        self.indices = qkv_indices

    def apply(self, cell, device_mesh):
        group, tokens = device_mesh.group, []

        def before(cell, args, kwargs):
            tokens.append(args[0].shape[1])
            exchanged = {i: _DTensor(sequence_to_heads(args[i], group)) for i in self.indices}
            return tuple(exchanged.get(i, x) for i, x in enumerate(args)), kwargs

        def after(cell, args, output):
            return heads_to_sequence(output, group, tokens.pop())

        cell.register_forward_pre_hook(before, with_kwargs=True)
        cell.register_forward_hook(after)
        return cell


@pytest.fixture
def hyper_parallel(monkeypatch):
    """A hyper_parallel that has ContextParallel alone."""
    stub = types.ModuleType("hyper_parallel")
    stub.ContextParallel = _ContextParallel
    monkeypatch.setitem(sys.modules, "hyper_parallel", stub)


def forward_of_ranks(size, rank):
    """Ranks in lockstep without gradients: each would switch them off and on again while it waits for the others."""
    with _no_grad():
        return lockstep.run(size, rank)


def _inputs(tokens=20):
    rng = np.random.default_rng(1)
    shapes = {"q": (1, tokens, 4, 8), "k": (1, tokens, 4, 8), "v": (1, tokens, 8, 8), "g": (1, tokens, 8, 8), "beta": (1, tokens, 8)}
    tensors = [rng.standard_normal(s).astype(np.float32) for s in shapes.values()]
    return tensors, Tensor(rng.standard_normal(8).astype(np.float32)), Tensor(rng.standard_normal(64).astype(np.float32))


CORE = KdaCoreConfig(4, 8, 8, 8, strategy="none", safe_gate=True)


@pytest.mark.parametrize("size", [2, 4])
def test_wrapped_by_hyper_parallel(size, hyper_parallel):
    """All five token tensors are exchanged, parameters sliced to the local heads: the output of one rank."""
    tensors, a_log, dt_bias = _inputs()
    want = KdaCore(CORE, CpGroup.single())(*(Tensor(x) for x in tensors), a_log, dt_bias)[0].asnumpy()

    def rank(group):
        core = context_parallel_core(CORE, group, _Mesh(group))
        assert isinstance(core, LocalHeads)
        begin, end = group.slice_bounds(20)
        return core(*(Tensor(x[:, begin:end].copy()) for x in tensors), a_log, dt_bias).asnumpy()

    got = np.concatenate(forward_of_ranks(size, rank), 1)
    assert np.linalg.norm(got - want) <= 1e-5 * np.linalg.norm(want)


def test_heads_must_divide(hyper_parallel):
    group = lockstep.run(3, lambda group: group)[0]
    with pytest.raises(ValueError, match="num_heads is 4; allowed under ulysses: a multiple of the group's size 3"):
        context_parallel_core(CORE, group, _Mesh(group))


def test_without_hyper_parallel_it_is_kcps_own():
    assert find_context_parallel() is None
    tensors, a_log, dt_bias = _inputs()
    core = context_parallel_core(CORE, CpGroup.single(), device_mesh=None)
    assert isinstance(core, OwnUlysses)
    want = KdaCore(CORE, CpGroup.single())(*(Tensor(x) for x in tensors), a_log, dt_bias)[0].asnumpy()
    assert np.array_equal(core(*(Tensor(x) for x in tensors), a_log, dt_bias).asnumpy(), want)


@pytest.mark.parametrize("strategy", ["ulysses", "state_scan"])
@pytest.mark.parametrize("wrapped", [False, True], ids=["own", "hyper_parallel"])
def test_parallelize(strategy, wrapped, request):
    """Two ranks with the same parameters: the layer's output on one rank, ShortConv's halo included."""
    if wrapped:
        request.getfixturevalue("hyper_parallel")
    whole, x = module(), hidden(20, 1)
    want = whole(x).asnumpy()
    values = {p.name: p.value() for p in whole.get_parameters()}

    def rank(group):
        layer = module()
        for p in layer.get_parameters():
            p.set_data(values[p.name])
        mesh = _Mesh(group) if wrapped else None
        parallelize_kda_self_attention(layer, mesh, group=group, strategy=strategy)
        assert {p.name for p in layer.get_parameters()} == set(values)
        begin, end = group.slice_bounds(20)
        return layer(x[begin:end]).asnumpy()

    got = np.concatenate(forward_of_ranks(2, rank), 0)
    assert np.linalg.norm(got - want) <= 1e-5 * np.linalg.norm(want)


def test_parallelize_asks_for_ranks():
    with pytest.raises(ValueError, match="^device_mesh and group are None; allowed: one of them"):
        parallelize_kda_self_attention(module())
    with pytest.raises(ValueError, match=r"^device_mesh has ranks \[0, 1, 3\]; allowed: evenly spaced"):
        parallelize_kda_self_attention(module(), SimpleNamespace(rank_list=(0, 1, 3)))
