"""One training step over all ranks: loss, gradients, their single reduction, the finite check, clipping, the optimizer.

Every rank differentiates the sum over its own valid tokens. One all-reduce over the world then adds the gradients, the
loss sums and the token counts in one vector, and everything is divided by the global count: the loss and the gradient
norm are the global ones, the same on every rank, whatever the split of samples and sequences.
"""

from copy import deepcopy
from typing import Any

import mindspore as ms
import numpy as np
from mindformers.tools.register import MindFormerModuleType, MindFormerRegister
from mindspore import Tensor, nn, ops
from mindspore.communication import GlobalComm, get_group_size

_NORM_EPS = 1e-6
_FROM_MINDFORMERS = {
    "parallel_config",
    "calculate_per_token_loss",
    "global_norm_spike_threshold",
    "print_separate_loss",
    "use_skip_data_by_global_norm",
    "lr_scheduler",
    "grouped_lr_scheduler",
    "local_norm",
}


def world_size() -> int:
    """Number of ranks that have joined the launch; 1 without communication."""
    return get_group_size() if GlobalComm.INITED else 1


@MindFormerRegister.register(MindFormerModuleType.WRAPPER)
class KcpTrainOneStepCell(nn.Cell):
    """Forward, backward, reduction, finite check, clipping and update; the ``runner_wrapper`` of a kcp run.

    Args:
        network: Cell that returns ``(loss_sum, token_count)`` of this rank, float32 scalars.
        optimizer: Optimizer of the trained parameters.
        use_clip_grad: Whether gradients are clipped by their global norm.
        max_grad_norm: The norm above which they are scaled down.
        max_skipped_steps: Steps in a row whose gradients are not finite after which the run is stopped (by
            :class:`kcp.monitor.KcpMonitor`).
        accumulation_steps: Parts that the batch is worked off in; gradients, loss sums and token counts are added up before the
            reduction, so the step is that of the whole batch.
        scale_sense: Only 1.0: no loss scaling is done.
        **kwargs: What MindFormers hands to every wrapper; not used.

    Inputs:
        The network's.

    Outputs:
        Tuple ``(loss, skipped, loss_scale, learning_rate, grad_norm)``, the layout MindFormers' callbacks read: the
        global loss, whether the update was skipped because a gradient is not finite, 1.0, the step's learning rate, and
        the global gradient norm before clipping.

    Raises:
        ValueError: An unknown option, or one with an illegal value.
    """

    def __init__(
        self,
        network: nn.Cell,
        optimizer: nn.Optimizer,
        use_clip_grad: bool = True,
        max_grad_norm: float = 1.0,
        max_skipped_steps: int = 10,
        accumulation_steps: int = 1,
        scale_sense: float = 1.0,
        **kwargs: Any,
    ):
        super().__init__(auto_prefix=False)
        unknown = sorted(set(kwargs) - _FROM_MINDFORMERS)
        if unknown:
            known = "use_clip_grad, max_grad_norm, max_skipped_steps, scale_sense"
            raise ValueError(f"runner_wrapper.{unknown[0]}: unknown option; known are {known}")
        if float(scale_sense) != 1.0:
            raise ValueError(f"runner_wrapper.scale_sense: {scale_sense} is not supported; leave it at 1.0")
        if max_grad_norm <= 0:
            raise ValueError(f"runner_wrapper.max_grad_norm: {max_grad_norm}; a positive number is needed")
        if max_skipped_steps < 1:
            raise ValueError(f"runner_wrapper.max_skipped_steps: {max_skipped_steps}; at least 1 is needed")
        if accumulation_steps < 1:
            raise ValueError(f"runner_wrapper.accumulation_steps: {accumulation_steps}; at least 1 is needed")
        self.network = network
        self.accumulation_steps = accumulation_steps
        self.network.set_grad()
        self.optimizer = optimizer
        self.use_clip_grad = use_clip_grad
        self.max_grad_norm = float(max_grad_norm)
        self.max_skipped_steps = max_skipped_steps
        self.weights = optimizer.parameters
        self.value_and_grad = ops.value_and_grad(self.network, None, self.weights, has_aux=True)
        self.concat = ops.Concat(0)
        self.world = world_size()
        if self.world > 1:
            self.all_reduce = ops.AllReduce(ops.ReduceOp.SUM)
        self.spans = self._spans([parameter.shape for parameter in self.weights])
        self.loss_scale = Tensor(1.0, ms.float32)
        self.learning_rate = deepcopy(optimizer.learning_rate)

    @staticmethod
    def _spans(shapes):
        """``(begin, end, shape)`` of every gradient in the fused vector."""
        ends = np.cumsum([int(np.prod(shape)) for shape in shapes]).tolist()
        return tuple(zip([0, *ends[:-1]], ends, shapes, strict=True))

    def construct(self, *inputs):
        fused = self._differentiate(inputs) if self.accumulation_steps == 1 else self._accumulate(inputs)
        if self.world > 1:
            fused = self.all_reduce(fused)
        total_count = ops.maximum(fused[-1], 1.0)
        loss = fused[-2] / total_count
        gradient = fused[:-2] / total_count
        norm = ops.sqrt((gradient * gradient).sum())
        # A NaN or an infinity of any rank is in the sum, so every rank sees it here and decides alike.
        finite = ops.isfinite(norm + loss)
        if self.use_clip_grad:
            gradient = gradient * ops.minimum(self.max_grad_norm / (norm + _NORM_EPS), 1.0)
        learning_rate = self._learning_rate()
        if finite:
            loss = ops.depend(loss, self.optimizer(self._split(gradient)))
        return loss, ops.logical_not(finite), self.loss_scale, learning_rate, norm

    def _differentiate(self, inputs):
        (loss_sum, count), gradients = self.value_and_grad(*inputs)
        return self._fuse(gradients, loss_sum, count)

    def _accumulate(self, inputs):
        """The same, part by part; a part begins when the one before is done, its exchanges too."""
        size = inputs[0].shape[0] // self.accumulation_steps
        fused = self._differentiate(self._part(inputs, 0, size))
        for number in range(1, self.accumulation_steps):
            part = self._part(inputs, number * size, (number + 1) * size)
            part = (ops.depend(part[0], fused),) + part[1:]
            fused = fused + self._differentiate(part)
        return fused

    @staticmethod
    def _part(inputs, begin, end):
        part = ()
        for x in inputs:
            part = part + (x[begin:end],)
        return part

    def _fuse(self, gradients, loss_sum, count):
        flat = ()
        for gradient in gradients:
            flat = flat + (gradient.reshape((-1,)).astype(ms.float32),)
        return self.concat(flat + (loss_sum.reshape((1,)), count.reshape((1,))))

    def _split(self, vector):
        gradients = ()
        for begin, end, shape in self.spans:
            gradients = gradients + (vector[begin:end].reshape(shape),)
        return gradients

    def _learning_rate(self):
        if not self.optimizer.dynamic_lr:
            return self.learning_rate
        if self.optimizer.is_group_lr:
            return self.learning_rate[-1](self.optimizer.global_step).reshape(())
        return self.learning_rate(self.optimizer.global_step).reshape(())
