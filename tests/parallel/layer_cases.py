"""Whole KDA layers and a whole tiny model on this rank's slice: losses and gradients, to be compared between numbers of ranks."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from kcp.layers import KdaAttention, KdaAttentionConfig
from kcp.models import KimiLinearConfig, KimiLinearForCausalLM
from kcp.parallel import CpGroup
from kcp.train_step import KcpTrainOneStepCell

HIDDEN, VOCABULARY, SAMPLE = 24, 31, 48

# tokens of every rank's slice for 1, 2 and 4 ranks: "short" ones hold one or two tokens where the convolution looks three back
SLICES = {
    "short": {1: (6,), 2: (1, 5), 4: (1, 2, 1, 2)},
    "long": {1: (150,), 2: (70, 80), 4: (64, 3, 60, 23)},
}
ROWS = {"short": ((0, 6), (0, 2, 3, 6)), "long": ((0, 150), (0, 1, 66, 66, 149, 150))}
DOCUMENTS = ((0, 48, 48, 48, 48), (0, 5, 13, 47, 48))  # of the model's samples


@dataclass(frozen=True)
class Case:
    """``what``: a key of SLICES for a layer; ``"model"``; ``"steps"``: the model after two training steps, all of it recomputed."""

    what: str
    strategy: str
    packed: bool = True
    mode: str = "pynative"
    mla: str = "latent_gather"

    @property
    def name(self) -> str:
        return "-".join((self.what, self.strategy, "packed" if self.packed else "dense", self.mode, self.mla))


def _set_weights(cell: nn.Cell) -> list[ms.Parameter]:
    """The same random weights on every rank, decays slow; returns the trained ones."""
    rng = np.random.default_rng(5)
    for parameter in cell.get_parameters():
        value = rng.standard_normal(parameter.shape) * 0.3
        if parameter.name.endswith("norm.weight"):
            value = value + 1.0
        if parameter.name.endswith("dt_bias"):
            value = value - 5.0
        parameter.set_data(Tensor(value.astype(np.float32)))
    return cell.trainable_params()


class _LayerLoss(nn.Cell):
    """Sum of squared distances from a target: a loss whose terms can't cancel."""

    def __init__(self, layer: KdaAttention, rows):
        super().__init__()
        self.layer = layer
        self.rows = rows

    def construct(self, x, target, boundaries):
        y = self.layer(x, self.rows if boundaries is None else boundaries)
        return ((y - target) * (y - target)).sum()


def _padded(rows) -> Tensor:
    longest = max(map(len, rows))
    return Tensor(np.array([[*row, *[row[-1]] * (longest - len(row))] for row in rows], np.int32))


def _layer(case: Case, group: CpGroup) -> dict[str, np.ndarray]:
    config = KdaAttentionConfig(
        HIDDEN, 4, head_dim=8, v_head_dim=6, conv_bias=True, gate_bias=True, safe_gate=True, allow_neg_eigval=True,
        strategy=case.strategy if group.size > 1 else "none",
    )  # fmt: skip
    rng = np.random.default_rng(6)
    x, target = rng.standard_normal((2, 2, sum(SLICES[case.what][1]), HIDDEN)).astype(np.float32)
    begin, end = group.slice_bounds(x.shape[1])
    graph = case.mode == "graph"
    rows = ROWS[case.what] if case.packed else None
    network = _LayerLoss(KdaAttention(config, group), None if graph else rows)
    weights = _set_weights(network)
    grad = ms.value_and_grad(network, 0, weights)
    inputs = Tensor(x[:, begin:end].copy()), Tensor(target[:, begin:end].copy())
    loss, (d_x, d_weights) = (ms.jit(grad) if graph else grad)(*inputs, _padded(rows) if graph and case.packed else None)
    gradients = {weight.name: gradient.asnumpy() for weight, gradient in zip(weights, d_weights, strict=True)}
    return {"loss": loss.asnumpy(), "x": d_x.asnumpy(), **gradients}


def _network(case: Case, group: CpGroup, **options) -> tuple[KimiLinearForCausalLM, tuple]:
    """A model of two KDA layers and one of MLA with experts, and two samples of packed documents."""
    alone = group.size == 1
    config = KimiLinearConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=32, num_hidden_layers=3, seq_length=SAMPLE,
        layer_types=["linear_attention", "full_attention", "linear_attention"], mlp_layer_types=["dense", "sparse", "dense"],
        linear_num_heads=4, linear_head_dim=8, num_attention_heads=4, kv_lora_rank=12, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8,
        num_experts=4, num_experts_per_token=2, num_shared_experts=1, moe_intermediate_size=16, num_expert_group=1, topk_group=1,
        kda_cp_strategy="none" if alone else case.strategy, mla_cp_strategy="none" if alone else case.mla, context_parallel_size=group.size,
        **options,
    )  # fmt: skip
    rng = np.random.default_rng(7)
    tokens = rng.integers(0, VOCABULARY, (2, SAMPLE + 1)).astype(np.int32)
    labels = np.where(rng.random((2, SAMPLE)) > 0.1, tokens[:, 1:], -100).astype(np.int32)
    inputs = Tensor(tokens[:, :-1].copy()), Tensor(labels), Tensor((labels >= 0).astype(np.int32))
    return KimiLinearForCausalLM(config, group), (*inputs, Tensor(np.array(DOCUMENTS, np.int32)))


def _model(case: Case, group: CpGroup) -> dict[str, np.ndarray]:
    ms.set_context(mode=ms.GRAPH_MODE if case.mode == "graph" else ms.PYNATIVE_MODE)
    network, inputs = _network(case, group)
    weights = _set_weights(network)
    (loss, count), gradients = ops.value_and_grad(network, None, weights, has_aux=True)(*inputs)
    results = {weight.name: gradient.asnumpy() for weight, gradient in zip(weights, gradients, strict=True)}
    ms.set_context(mode=ms.PYNATIVE_MODE)
    return {"loss": loss.asnumpy(), "count": count.asnumpy(), **results}


def _steps(case: Case, group: CpGroup) -> dict[str, np.ndarray]:
    """Losses of two steps and what they changed, with the float32 spacing of the weights (``"spacing of NAME"``), below which a change
    can't be seen; the kernels recompute their caches and MindSpore every decoder layer."""
    ms.set_context(mode=ms.GRAPH_MODE if case.mode == "graph" else ms.PYNATIVE_MODE)
    network, inputs = _network(case, group, kda_disable_recompute=False)
    weights = _set_weights(network)
    start = [weight.asnumpy().copy() for weight in weights]
    for layer in network.model.layers:
        layer.recompute()
    step = KcpTrainOneStepCell(network, nn.SGD(weights, learning_rate=0.5), use_clip_grad=False)
    step.set_train()
    losses = [step(*inputs)[0].asnumpy() for _ in range(2)]
    ms.set_context(mode=ms.PYNATIVE_MODE)
    changes = {weight.name: weight.asnumpy() - before for weight, before in zip(weights, start, strict=True)}
    spacings = {f"spacing of {weight.name}": np.spacing(np.abs(before)) for weight, before in zip(weights, start, strict=True)}
    return {"loss": losses[0], "second loss": losses[1], **changes, **spacings}


def run(case: Case, rank_group) -> dict[str, np.ndarray]:
    """One rank's loss and gradients; ``rank_group(slice_lengths)`` gives its group."""
    if case.what in ("model", "steps"):
        return (_model if case.what == "model" else _steps)(case, rank_group(None))
    size = rank_group(None).size
    return _layer(case, rank_group(SLICES[case.what][size]))


def merged(case: Case, ranks: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Losses and gradients of weights summed over the ranks, gradients of tokens put together; after steps all ranks are the same."""
    if case.what == "steps":
        for other, name in itertools.product(ranks[1:], ranks[0]):
            np.testing.assert_array_equal(ranks[0][name], other[name], err_msg=name)
        return ranks[0]
    return {name: np.concatenate([r[name] for r in ranks], 1) if name == "x" else sum(r[name] for r in ranks) for name in ranks[0]}
