"""A whole KDA layer over many ranks of one process, forward and backward, against the same layer on one device (``kcp simulate layer``).

``ms.grad`` of one rank can't stop for another's, so the layer is taken apart where ranks exchange something. With P the projections, C the
convolution and the core's other inputs, F the gated norm and output projection:

    qkv = P(x),  halo = exchange(qkv),  core inputs = C(x, qkv, halo),  out = core(core inputs),  y = F(x, out)

P, C and F act on one rank alone and are differentiated by MindSpore; the exchange and the core have explicit backwards, in lockstep.
"""

import mindspore as ms
import numpy as np
from mindspore import Tensor, ops

from kcp.layers.kda_attention import KdaAttention, KdaAttentionConfig
from kcp.layers.short_conv import tokens_into_document
from kcp.ops.options import describe
from kcp.parallel import lockstep
from kcp.parallel.group import CpGroup
from kcp.parallel.simulate import boundaries_of, relative, slice_lengths

MOST_LAYER_RANKS = 64
LAYER_STRATEGIES = ("ulysses", "state_scan", "ptp_chain", "ptp_tree", "hybrid")
GATES = {"output": 1e-5, "input": 5e-5, "projections": 5e-5, "convolution": 5e-5, "decay": 5e-5, "norm": 5e-5}  # forward, then gradients
HIDDEN = 64


def random_documents(tokens: int, ranks: int, seed: int) -> tuple[int, ...]:
    """Lengths of packed documents, ``tokens`` in all: about two ranks each, one of a single token; from 3 ranks on one ends a slice."""
    border = sum(slice_lengths(tokens, ranks)[: (ranks - 1) // 2])
    cuts = np.random.default_rng(seed).integers(1, tokens, ranks // 2)
    return tuple(int(n) for n in np.diff(sorted({0, 1, border, tokens, *cuts.tolist()})))


class LayerSimulation:
    """One KDA layer with random weights, all parameters that it can have, and its results on one device.

    Args:
        ranks: W, 2 to 64.
        tokens: T >= W, one row; slices are as equal as they can be.
        heads, width: H = Hk = Hv, and K = V <= 256.
        decay: above 0, at most 5; the forget gate's bias gives log decays uniform in [-decay, 0]; write strengths reach 2.
        documents: lengths of packed documents, T in all; None: one.
        seed: of the weights, inputs and output gradients.

    Raises:
        ValueError: sizes that don't fit.
    """

    def __init__(
        self,
        ranks: int,
        tokens: int,
        heads: int = 2,
        width: int = 32,
        decay: float = 0.01,
        documents: tuple[int, ...] | None = None,
        seed: int = 0,
    ):
        if not 2 <= ranks <= MOST_LAYER_RANKS:
            raise ValueError(f"ranks is {ranks}; allowed: 2 to {MOST_LAYER_RANKS}")
        if tokens < ranks:
            raise ValueError(f"tokens is {tokens}; allowed: at least 1 a rank, {ranks}")
        if not 0 < decay <= 5:
            raise ValueError(f"decay is {decay}; allowed: above 0, at most 5")
        self.boundaries = boundaries_of(documents, tokens)
        self.ranks, self.lengths = ranks, slice_lengths(tokens, ranks)
        self.heads, self.width = heads, width
        rng = np.random.default_rng(seed)
        layer = self._layer("none", CpGroup.single(), None)
        self.weights = {p.name: _start(p.name, p.shape, decay, rng) for p in layer.get_parameters()}
        self.x, self.d_y = rng.standard_normal((2, 1, tokens, HIDDEN)).astype(np.float32)
        self.expected = self._one_device()

    def errors(self, strategy: str) -> dict[str, float]:
        """Worst relative L2 of the ranks against one device, by the names of :data:`GATES`; weights' gradients are summed over the ranks.

        Args:
            strategy: as in :class:`~kcp.layers.kda_core.KdaCoreConfig`.

        Raises:
            ValueError: the strategy is unknown or can't serve these sizes.
        """
        results = lockstep.run(self.ranks, lambda group: self._rank(group, strategy), self.lengths)
        worst = dict.fromkeys(GATES, 0.0)
        for name, expected in self.expected.items():
            parts = [r[name] for r in results]
            error = relative(np.concatenate(parts, 1) if name in ("output", "input") else sum(parts), expected)
            worst[_kind(name)] = float(np.maximum(worst[_kind(name)], error))  # keeps what is not a number
        return worst

    def _layer(self, strategy, group, weights):
        config = KdaAttentionConfig(
            HIDDEN, self.heads, head_dim=self.width, conv_bias=True, gate_bias=True, safe_gate=True, allow_neg_eigval=True,
            strategy=strategy, hybrid_ulysses_degree=self._hybrid_degree() if strategy == "hybrid" else None,
        )  # fmt: skip
        layer = KdaAttention(config, group)
        for parameter in layer.get_parameters() if weights else ():
            parameter.set_data(Tensor(weights[parameter.name]))
        return layer

    def _hybrid_degree(self):
        """Ranks that exchange heads: about the square root of all, so that states cross ranks as well."""
        return max(n for n in range(1, self.ranks) if n * n <= self.ranks and self.ranks % n == 0 and self.heads % n == 0)

    def _one_device(self):
        layer, d_y = self._layer("none", CpGroup.single(), self.weights), Tensor(self.d_y)
        parameters = layer.trainable_params()

        def loss(x):
            y = layer(x, self.boundaries)
            return (y * d_y).sum(), y

        (_, y), (d_x, d_weights) = ms.value_and_grad(loss, 0, parameters, has_aux=True)(Tensor(self.x))
        return _named(y, d_x, parameters, d_weights)

    def _rank(self, group, strategy):
        begin, end = group.slice_bounds(self.x.shape[1])
        x, d_y = Tensor(self.x[:, begin:end].copy()), Tensor(self.d_y[:, begin:end].copy())
        layer = self._layer(strategy, group, self.weights)
        conv, parameters = layer.short_conv, layer.trainable_params()
        into = None if self.boundaries is None else tokens_into_document(begin, end, self.boundaries)

        def core_inputs(x, qkv, halo):
            return layer.core_inputs(x, conv.convolve(qkv, halo, *layer.taps(), into))

        qkv = layer.project(x)
        halo = conv.halo.forward(qkv)
        tokens = core_inputs(x, qkv, halo)
        none = ops.zeros((1,), ms.float32)
        inputs = (*tokens, layer.A_log.value().reshape((-1,)), layer.dt_bias.value(), none, none)
        cell = layer.core.strategy_cell((*map(describe, inputs[:7]), None), self.boundaries, None, False)
        results = cell.construct(*inputs)
        y = layer.close(x, results[0])

        (d_x, d_out), d_weights = _gradients(layer.close, (x, results[0]), parameters, d_y)
        d_core = cell.bprop(*inputs, results, (d_out, None))
        (d_x_gates, d_qkv, d_halo), d_inner = _gradients(core_inputs, (x, qkv, halo), parameters, d_core[:5])
        d_qkv = d_qkv + conv.halo.backward(qkv, d_halo)
        (d_x_projected,), d_first = _gradients(layer.project, (x,), parameters, d_qkv)
        d_weights = [sum(parts) for parts in zip(d_weights, d_inner, d_first, strict=True)]
        out = _named(y, d_x + d_x_gates + d_x_projected, parameters, d_weights)
        for name, gradient in (("A_log", d_core[5]), ("dt_bias", d_core[6])):
            out[name] = gradient.asnumpy().reshape(out[name].shape)
        return out


def _start(name, shape, decay, rng):
    """Weights that let every part of the layer matter: projections keep the size of what they project."""
    value = rng.standard_normal(shape)
    if name == "dt_bias":
        rate = rng.uniform(0.02, 0.98, shape) * decay / 5.0  # of the lower bound -5
        value = np.log(rate / (1.0 - rate))
    elif name == "o_norm.weight":
        value = 1.0 + 0.1 * value
    elif name.endswith("proj.weight"):
        value = value * shape[1] ** -0.5
    else:
        value = 0.3 * value
    return value.astype(np.float32)


def _kind(name):
    if name in GATES:
        return name
    kinds = {"conv1d": "convolution", "A_log": "decay", "dt_bias": "decay", "o_norm": "norm"}
    return next((kind for part, kind in kinds.items() if part in name), "projections")


def _gradients(part, inputs, parameters, d_outputs):
    """``(gradients of the inputs, gradients of the parameters)`` of a part of the layer that exchanges nothing, given its outputs'."""

    def loss(*inputs):
        outputs = part(*inputs)
        if isinstance(outputs, Tensor):
            return (outputs * d_outputs).sum()
        return sum((output * d_output).sum() for output, d_output in zip(outputs, d_outputs, strict=True))

    return ms.grad(loss, tuple(range(len(inputs))), parameters)(*inputs)


def _named(y, d_x, parameters, d_weights):
    gradients = {parameter.name: gradient.asnumpy() for parameter, gradient in zip(parameters, d_weights, strict=True)}
    return {"output": y.asnumpy(), "input": d_x.asnumpy(), **gradients}
