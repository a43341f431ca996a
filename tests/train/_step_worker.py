"""Worker of test_train_step: the one-step cell and the digests on two ranks; prints ``RESULT {...}``, JSON."""

import hashlib
import json

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops
from mindspore.communication import get_rank, init

ms.set_device("CPU")
ms.runtime.launch_blocking()
init()

from mindformers.core.optim import AdamW  # noqa: E402

from kcp.digest import RankMismatchError, check_same_on_all_ranks, digests  # noqa: E402
from kcp.train_step import KcpTrainOneStepCell  # noqa: E402

RANK = get_rank()


class SquaredError(nn.Cell):
    """``sum_n weight_n (x_n . w - y_n)^2``, and the sum of the weights."""

    def __init__(self):
        super().__init__()
        self.w = ms.Parameter(Tensor(np.array([0.5, -1.0, 2.0], np.float32)), name="w")

    def construct(self, x, y, weight):
        error = (x * self.w).sum(-1) - y
        return (weight * error * error).sum(), weight.sum()


def batches():
    """Three batches; ranks hold 4 tokens each, of which a different number counts; rank 1's second one has a NaN."""
    rng = np.random.default_rng(RANK)
    for step in range(3):
        x = rng.normal(size=(4, 3)).astype(np.float32)
        y = rng.normal(size=4).astype(np.float32)
        weight = np.array([1, 1, 1, RANK == 0], np.float32)
        if step == 1 and RANK == 1:
            x[0, 0] = np.nan
        yield Tensor(x), Tensor(y), Tensor(weight)


def run(mode) -> dict:
    ms.set_context(mode=mode)
    network = SquaredError()
    optimizer = nn.SGD(network.trainable_params(), learning_rate=0.1)
    step = KcpTrainOneStepCell(network, optimizer, max_grad_norm=0.5)
    step.set_train()
    history = []
    for batch in batches():
        loss, skipped, _, rate, norm = step(*batch)
        values = [float(loss.asnumpy()), bool(skipped.asnumpy()), float(norm.asnumpy())]
        history.append(values + [float(rate.asnumpy()), network.w.asnumpy().tolist()])
    return {"history": history, "parameters": [parameter.name for parameter in step.weights]}


class Poison(nn.Cell):
    """``x``, whose gradient comes back with ``poison`` added."""

    def construct(self, x, poison):
        return x * 1.0

    def bprop(self, x, poison, out, dout):
        return dout + poison, poison * 0.0


class PoisonedError(nn.Cell):
    """:class:`SquaredError` with something added to the gradient, and to the loss."""

    def __init__(self):
        super().__init__()
        self.w = ms.Parameter(Tensor(np.array([0.5, -1.0, 2.0], np.float32)), name="w")
        self.poison = Poison()

    def construct(self, x, y, weight, to_gradient, to_loss):
        error = (x * self.poison(self.w, to_gradient)).sum(-1) - y
        return (weight * error * error).sum() + to_loss, weight.sum()


NAN, INF = float("nan"), float("inf")
# What rank 0 and rank 1 add to their gradient's second entry, and to their loss.
FAULTS = [
    ((0, 0), (0, 0)),
    ((0, NAN), (0, 0)),
    ((INF, 0), (0, 0)),
    ((INF, -INF), (0, 0)),
    ((0, 0), (NAN, 0)),
    ((0, 0), (0, -INF)),
    ((1e30, 0), (0, 0)),
    ((3e38, 3e38), (0, 0)),
    ((0, 0), (0, 0)),
]


def run_faults(mode) -> list:
    """``[skipped, loss, digest of every parameter's bits, w]`` after each step; optimizer AdamW."""
    ms.set_context(mode=mode)
    network = PoisonedError()
    step = KcpTrainOneStepCell(network, AdamW(network.trainable_params(), learning_rate=0.1, betas=(0.9, 0.95)), use_clip_grad=False)
    step.set_train()
    batch = next(iter(batches()))
    history = []
    for gradients, losses in FAULTS:
        to_gradient = np.array([0, gradients[RANK], 0], np.float32)
        loss, skipped, *_ = step(*batch, Tensor(to_gradient), Tensor(losses[RANK], ms.float32))
        state = hashlib.sha256()
        names = []
        for parameter in step.get_parameters():
            names.append(parameter.name)
            state.update(parameter.asnumpy().tobytes())
        history.append([bool(skipped.asnumpy()), float(loss.asnumpy()), state.hexdigest(), network.w.asnumpy().tolist(), sorted(names)])
    return history


def mismatch(config: dict, parameters: list) -> str:
    try:
        check_same_on_all_ranks(digests(config, parameters))
    except RankMismatchError as error:
        return str(error)
    return ""


def parameter(value: float) -> ms.Parameter:
    return ms.Parameter(Tensor(np.full(3, value, np.float32)), name="p")


same, nearly = parameter(1.0), parameter(1.0 + RANK * 2.0**-23)
result = {
    "pynative": run(ms.PYNATIVE_MODE),
    "graph": run(ms.GRAPH_MODE),
    "faults_pynative": run_faults(ms.PYNATIVE_MODE),
    "faults_graph": run_faults(ms.GRAPH_MODE),
    "same": mismatch({"a": 1}, [same]),
    "configuration": mismatch({"a": RANK}, [same]),
    "parameters": mismatch({"a": 1}, [nearly]),
    "total": float(ops.AllReduce()(Tensor([1.0], ms.float32))[0]),
}
print("RESULT " + json.dumps(result), flush=True)
