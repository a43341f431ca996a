"""What the monitor measures at an interval: health of the KDA layers, balance of the experts, loss on held-back text."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from mindspore import Tensor, nn, ops

from kcp.layers.kda_health import FIGURES
from kcp.train_step import world_size


def from_all_ranks(values: np.ndarray) -> np.ndarray:
    """``[...] -> [W, ...]``: every rank's float32 values, in rank order. Collective over the world."""
    own = values.astype(np.float32).reshape(1, -1)
    gathered = ops.AllGather()(Tensor(own)).asnumpy() if world_size() > 1 else own
    return gathered.reshape((-1, *values.shape))


class Health:
    """Health of every KDA layer and balance of every mixture of experts, over all ranks, on the step's batch after its update.

    Args:
        every_steps: Steps from one measurement to the next.
        parts: Parts that the batch is worked off in; the first one is measured.
    """

    def __init__(self, every_steps: int, parts: int = 1):
        self.every_steps = every_steps
        self.parts = parts

    def begin(self, params: Any) -> None:
        """Find the model inside MindFormers' cell that orders the columns of a batch."""
        network = params.train_network.network
        model = getattr(network, "network", network)
        self.probe = HealthProbe(model)
        self.kda_layers, self.moe_layers = model.health_layers()

    def measure(self, step: int, params: Any) -> tuple[dict[str, Any], str]:
        """Keys ``health`` and ``moe`` of a step's record, and the worst balance for the progress line."""
        if step % self.every_steps:
            return {}, ""
        batch = params.train_dataset_element
        rows = batch[0].shape[0] // self.parts
        kda, load = self.probe(*(column[:rows] for column in batch))
        record: dict[str, Any] = {}
        remark = ""
        if self.kda_layers:
            record["health"] = dict(zip(self._names(self.kda_layers), combine(from_all_ranks(kda.asnumpy())), strict=True))
        if self.moe_layers:
            found = from_all_ranks(load.asnumpy())
            shares, margins = found[..., :-1].mean(0), found[..., -1].min(0)
            balance = [
                {"max_over_mean": _number(share.max() / share.mean()), "router_margin": _number(margin)}
                for share, margin in zip(shares, margins, strict=True)
            ]
            record["moe"] = dict(zip(self._names(self.moe_layers), balance, strict=True))
            worst = max((layer["max_over_mean"] for layer in balance if layer["max_over_mean"] is not None), default=math.nan)
            remark = f"  experts {worst:.2f} max/mean"
        return record, remark

    @staticmethod
    def _names(layers: Sequence[int]) -> list[str]:
        return [f"layer_{layer}" for layer in layers]


def combine(figures: np.ndarray) -> list[dict[str, float | None]]:
    """Figures of every layer over all ranks from ``[W, layers, 7]``: extremes of extremes, means of the rest."""
    how = {"log_decay_min": np.min, "log_decay_max": np.max}
    columns = [how.get(name, np.mean)(figures[:, :, column], 0) for column, name in enumerate(FIGURES)]
    return [{name: _number(values[layer]) for name, values in zip(FIGURES, columns, strict=True)} for layer in range(figures.shape[1])]


def _number(value: Any) -> float | None:
    """A JSON number of six digits; None for what is not finite."""
    return float(f"{float(value):.6g}") if math.isfinite(value) else None


class HealthProbe(nn.Cell):
    """A forward pass that hands out figures; takes a batch, gives ``([KDA layers, 7], [sparse layers, E + 1])``."""

    def __init__(self, model: nn.Cell):
        super().__init__(auto_prefix=False)
        self.model = model

    def construct(self, input_ids, labels, loss_mask, cu_seqlens=None):
        return self.model.health(input_ids, cu_seqlens)


class Evaluation:
    """Loss and perplexity on held-back samples, over all ranks.

    Args:
        dataset: MindSpore dataset of this rank's batches, the same at every pass.
        every_steps: Steps from one evaluation to the next.
    """

    def __init__(self, dataset: Any, every_steps: int):
        self.dataset = dataset
        self.every_steps = every_steps

    def begin(self, params: Any) -> None:
        """Take the network, which gives ``(loss_sum, token_count)`` of this rank for a batch."""
        self.network = params.train_network.network

    def measure(self, step: int, params: Any) -> tuple[dict[str, Any], str]:
        """Keys ``eval_loss`` and ``eval_perplexity`` of a step's record."""
        if step % self.every_steps:
            return {}, ""
        total = np.zeros(2, np.float64)
        for batch in self.dataset.create_tuple_iterator(num_epochs=1):
            total += [float(value.asnumpy()) for value in self.network(*batch)]
        total = from_all_ranks(total).sum(0, dtype=np.float64)
        loss = total[0] / max(total[1], 1.0)
        if not math.isfinite(loss):
            return {"eval_loss": None, "eval_perplexity": None}, f"  eval_loss {loss}"
        perplexity = math.exp(min(loss, 700.0))
        return {"eval_loss": loss, "eval_perplexity": perplexity}, f"  eval_loss {loss:.4f}  eval_perplexity {perplexity:.4g}"
