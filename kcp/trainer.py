"""MindFormers' trainer of causal language models, taught what it does not see through its own wrapper of the network."""

from typing import Any

from mindformers.tools.register import MindFormerModuleType, MindFormerRegister
from mindformers.trainer import CausalLanguageModelingTrainer
from mindspore import nn


@MindFormerRegister.register(MindFormerModuleType.TRAINER)
class KcpTrainer(CausalLanguageModelingTrainer):
    """Groups parameters by what the model says about weight decay.

    MindFormers asks the network that it trains for ``no_weight_decay_keywords``; by then the model is inside the cell that orders the
    columns of a batch, which does not answer.
    """

    def create_optimizer_scheduler(self, network: nn.Cell, model_params: set) -> Any:
        """The optimizer for the model inside ``network``."""
        return super().create_optimizer_scheduler(getattr(network, "network", network), model_params)
