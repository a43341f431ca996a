"""Health figures of a KDA layer: how far it remembers, how much it writes, how large its state gets.

A head forgets through its transition M over a run of tokens (H_out = M H_in + E, section 2 of the design). Once every entry of M is
below :data:`VANISHED`, nothing of what came before the run is left after it: such a head sees no further than that run.
"""

import mindspore as ms
from mindspore import Tensor, ops

from kcp.ops import backends, numerics
from kcp.ops.gates import log_decay
from kcp.ops.options import KdaOptions

VANISHED = 1e-6
FIGURES = ("log_decay_mean", "log_decay_min", "log_decay_max", "beta_mean", "output_gate_mean", "state_norm", "vanished_heads")


@ms.jit_class
class HealthMeter:
    """Figures of one layer over this rank's slice, every row taken as one document.

    Args:
        config: the layer's :class:`~kcp.layers.kda_core.KdaCoreConfig`.
        fields: fields of :class:`~kcp.ops.options.KdaOptions` that the core passes on, as for its strategies.
    """

    def __init__(self, config, fields: dict):
        self.opts = KdaOptions(**fields)
        self.backend = backends.select("chunk_kda")
        self.safe_gate, self.lower_bound = config.safe_gate, config.lower_bound
        self.beta_factor = 2.0 if config.allow_neg_eigval else 1.0
        self.boundaries = Tensor([0, 0], ms.int32)

    def measure(self, q, k, v, g, beta, a_log, dt_bias, output_gate):
        """``[7]`` float32 in the order of :data:`FIGURES`.

        Args:
            q, k ``[B, T, Hk, K]``; v ``[B, T, Hv, V]``; g ``[B, T, Hv, K]`` and beta ``[B, T, Hv]`` before their gates; a_log ``[Hv]``;
                dt_bias ``[Hv * K]``: the core's inputs.
            output_gate: ``[B, T, Hv, V]`` before its sigmoid.
        """
        bias = dt_bias.reshape((g.shape[2], g.shape[3]))
        decay = log_decay(ops.cast(ops.swapaxes(g, 1, 2), ms.float32), a_log, bias, True, self.safe_gate, self.lower_bound)
        written = self.beta_factor * numerics.sigmoid(ops.cast(beta, ms.float32))
        passed = numerics.sigmoid(ops.cast(output_gate, ms.float32))
        opened = self.backend.forward_open(self.opts, q, k, v, g, beta, a_log, dt_bias, self.boundaries)
        summary = self.backend.forward_summary(self.opts, q, k, v, g, beta, a_log, dt_bias, self.boundaries, opened)
        width = v.shape[-1]
        state, transition = summary[..., :width], ops.abs(summary[..., width:])
        norms = ops.sqrt((state * state).sum((-2, -1)))
        largest = ops.ReduceMax()(transition, (-2, -1))
        vanished = ops.cast(largest < VANISHED, ms.float32)
        figures = (
            decay.mean(), ops.ReduceMin()(decay), ops.ReduceMax()(decay), written.mean(), passed.mean(), norms.mean(), vanished.mean(),
        )  # fmt: skip
        return ops.concat([figure.reshape((1,)) for figure in figures], 0)
