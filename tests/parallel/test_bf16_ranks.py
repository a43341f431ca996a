"""bfloat16 tokens over ranks: every strategy within the rounding of its storage; a model that would need more of the CPU is refused."""

import mindspore as ms
import numpy as np
import pytest
from core_cases import INPUTS, STRATEGIES, TOKEN_INPUTS, CoreProblem, relative
from mindspore import Tensor, ops

from kcp.layers import KdaCore
from kcp.ops.options import describe
from kcp.parallel import lockstep

# Rounding a tensor to bfloat16 costs 0.17 %; a result is rounded once, from inputs that the oracle sees as they are.
ROUNDING = 0.004


class Rounded(CoreProblem):
    """The same problem with token tensors that bfloat16 holds."""

    def arrays(self):
        found = super().arrays()
        for name in (*TOKEN_INPUTS, "d_out"):
            bits = found[name].view(np.uint32)
            found[name] = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)
        return found


def run(problem, group):
    tensors = problem.rank_tensors(group.rank)
    inputs = [ops.cast(tensors[name], ms.bfloat16) if name in TOKEN_INPUTS else tensors[name] for name in INPUTS]
    cell = KdaCore(problem.config(), group).strategy_cell(tuple(describe(x) for x in inputs), None, None, True)
    inputs.append(ops.zeros((1,), ms.float32))
    results = cell.construct(*inputs)
    grads = cell.bprop(*inputs, results, (ops.cast(tensors["d_out"], ms.bfloat16), tensors["d_final"]))
    assert results[0].dtype == ms.bfloat16 and results[1].dtype == ms.float32
    assert all(grad.dtype == x.dtype for grad, x in zip(grads[:8], inputs, strict=False))
    named = {"out": results[0], "final_state": results[1], **dict(zip(INPUTS, grads[:8], strict=True))}
    return {name: ops.cast(x, ms.float32).asnumpy() for name, x in named.items()}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_bf16_tokens_over_three_ranks(cpu_device, strategy):
    problem = Rounded(lengths=(18, 18, 18), strategy=strategy, num_heads=3, num_v_heads=6)
    ranks = lockstep.run(3, lambda group: run(problem, group), problem.lengths, True)
    truth = problem.truth()
    for name in ("out", *TOKEN_INPUTS):
        assert relative(np.concatenate([rank[name] for rank in ranks], 1), truth[name]) <= ROUNDING, name
    for rank in ranks:
        assert relative(rank["final_state"], truth["final_state"]) <= 1e-5


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_16_bit_model_is_refused_on_the_cpu(cpu_device, dtype):
    from kcp.models import KimiLinearConfig, KimiLinearForCausalLM

    if cpu_device != "CPU":
        pytest.skip("refused on the CPU alone")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "linear_num_heads": 2, "linear_head_dim": 8}
    with pytest.raises(ValueError, match=f"compute_dtype: '{dtype}' is not supported; float32 is needed on the CPU"):
        KimiLinearForCausalLM(KimiLinearConfig(vocab_size=23, seq_length=32, compute_dtype=dtype, **sizes))


def test_a_16_bit_tensor_is_one_of_mindspore(cpu_device):
    """What the tests above rest on: casts and their rounding exist on this device."""
    exact = Tensor(np.float32([1.0, 1.0 + 2**-9, 3.0]))
    assert ops.cast(ops.cast(exact, ms.bfloat16), ms.float32).asnumpy().tolist() == [1.0, 1.0, 3.0]
