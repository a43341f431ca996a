"""When the layers around the attention run on the native kernels, one operator forward and one backward, in place of MindSpore's."""

from mindspore.ops import constexpr

from kcp.ops import backends
from kcp.ops.backends.native_layers import LANE, MAX_TAPS, ROW_BLOCK, layer_cell

__all__ = ["LANE", "MAX_TAPS", "ROW_BLOCK", "layer_cell", "serves"]


@constexpr(check=False)
def serves(shape: tuple[int, ...]) -> bool:
    """Whether the native layers serve a tensor of this shape here: the native backend is chosen for the op, and the tensor is not empty."""
    return 0 not in shape and backends.select("chunk_kda").__name__.endswith(".native")
