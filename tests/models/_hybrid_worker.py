"""msrun worker: the golden checkpoint at this rank with several strategies; logits, loss parts and gradients go to a folder."""

import sys
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore.communication import get_group_size, get_rank, init

sys.path.append(str(Path(__file__).resolve().parents[1]))
sys.path.append(str(Path(__file__).resolve().parents[2]))

ms.set_device("CPU")
ms.runtime.launch_blocking()
init()

from hf_cases import golden_folder, golden_results, shifted_labels  # noqa: E402
from mindspore import Tensor, ops  # noqa: E402

from kcp.models import load_hf  # noqa: E402
from kcp.parallel import CpGroup  # noqa: E402

SLICES = {2: None, 4: (40, 37, 9, 64)}  # 150 tokens do not divide by 4

folder = Path(sys.argv[1])
ids = golden_results()["input_ids"].astype(np.int32)
labels = shifted_labels(ids)
inputs = Tensor(ids), Tensor(labels), Tensor((labels >= 0).astype(np.int32))
for case in sys.argv[2:]:
    kda, mla, mode = case.split(":")
    ms.set_context(mode=ms.GRAPH_MODE if mode == "graph" else ms.PYNATIVE_MODE)
    options = {"kda_cp_strategy": kda, "mla_cp_strategy": mla, "context_parallel_size": get_group_size(), "seq_length": 152}
    model = load_hf(golden_folder(), CpGroup.world(SLICES[get_group_size()]), **options)
    weights = model.trainable_params()
    (total, count), gradients = ops.value_and_grad(model, None, weights, has_aux=True)(*inputs)
    results = {weight.name: gradient.asnumpy() for weight, gradient in zip(weights, gradients, strict=True)}
    ms.set_context(mode=ms.PYNATIVE_MODE)
    results |= {"total": total.asnumpy(), "count": count.asnumpy(), "logits": model.logits(inputs[0]).asnumpy()}
    np.savez(folder / f"{kda}-{mla}-{mode}-{get_rank()}.npz", **results)
