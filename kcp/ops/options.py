"""Options of the op and the checks of its arguments: every error names the argument, what it got and what is allowed."""

from dataclasses import dataclass

import mindspore as ms
import numpy as np
from mindspore import Tensor
from mindspore.ops import constexpr

from kcp.ops.layouts import LAYOUTS

CHUNK_SIZES = (16, 32, 64)
MAX_WIDTH = 256
STORAGE = ("Float32", "Float16", "BFloat16")
BACKWARD_MODES = ("none", "forward", "recompute", "save")


@ms.jit_class
@dataclass(frozen=True)
class KdaOptions:
    """Everything about a call of the op that is known before its tensors.

    ``cu_seqlens``: None (dense), a tuple of host integers, or ``"tensor"`` (boundaries arrive as an int32 Tensor).
    """

    scale: float
    chunk_size: int = 64
    layout: str = "BNSD"
    safe_gate: bool = False
    lower_bound: float = -5.0
    use_gate_in_kernel: bool = True
    has_a_log: bool = False
    has_dt_bias: bool = False
    has_initial_state: bool = False
    cu_seqlens: tuple | str | None = None
    disable_recompute: bool = True
    state_v_first: bool = False
    epsilon: float = 1e-6
    use_qk_l2norm_in_kernel: bool = False
    use_beta_sigmoid_in_kernel: bool = False
    allow_neg_eigval: bool = False
    use_exp2: bool = True
    beta_factor: float = 1.0

    def __post_init__(self):
        check_number("scale", self.scale)
        check_chunk_size(self.chunk_size)
        check_choice("layout", self.layout, LAYOUTS)
        check_lower_bound(self.lower_bound)
        check_number("epsilon", self.epsilon, minimum=0.0)
        for name in _FLAGS:
            check_flag(name, getattr(self, name))
        if self.allow_neg_eigval and not self.use_beta_sigmoid_in_kernel:
            raise ValueError(
                "allow_neg_eigval is True but use_beta_sigmoid_in_kernel is False; allowed: allow_neg_eigval only together with "
                "use_beta_sigmoid_in_kernel=True (beta becomes 2 * sigmoid(beta))"
            )
        if self.use_gate_in_kernel and not self.safe_gate and not self.has_a_log:
            raise ValueError(
                "a_log is None with use_gate_in_kernel=True and safe_gate=False; allowed: a_log [Hv] for the softplus gate, "
                "safe_gate=True, or use_gate_in_kernel=False with log decays in g"
            )
        if not self.use_gate_in_kernel and (self.has_a_log or self.has_dt_bias):
            name = "a_log" if self.has_a_log else "dt_bias"
            raise ValueError(f"{name} is given with use_gate_in_kernel=False, which takes g as the log decay; allowed: None")
        object.__setattr__(self, "beta_factor", 2.0 if self.allow_neg_eigval else 1.0)


_FLAGS = (
    "safe_gate", "use_gate_in_kernel", "disable_recompute", "state_v_first", "use_qk_l2norm_in_kernel",
    "use_beta_sigmoid_in_kernel", "allow_neg_eigval", "use_exp2",
)  # fmt: skip


def check_flag(name, value):
    if not isinstance(value, bool):
        raise TypeError(f"{name} is {value!r} of type {type(value).__name__}; allowed: True or False")


def check_number(name, value, minimum=None):
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} is {value!r} of type {type(value).__name__}; allowed: a finite number")
    if value != value or value in (float("inf"), float("-inf")) or (minimum is not None and value < minimum):
        raise ValueError(f"{name} is {value!r}; allowed: a finite number" + ("" if minimum is None else f" >= {minimum}"))


def check_choice(name, value, choices):
    if value not in choices:
        raise ValueError(f"{name} is {value!r}; allowed: {', '.join(repr(c) for c in choices)}")


def check_chunk_size(chunk_size):
    if isinstance(chunk_size, bool) or not isinstance(chunk_size, int):
        raise TypeError(f"chunk_size is {chunk_size!r} of type {type(chunk_size).__name__}; allowed: 16, 32 or 64")
    check_choice("chunk_size", chunk_size, CHUNK_SIZES)


def check_lower_bound(lower_bound):
    check_number("lower_bound", lower_bound)
    if not -5.0 <= lower_bound < 0.0:
        raise ValueError(f"lower_bound is {lower_bound!r}; allowed: [-5, 0)")


def check_cu_seqlens(cu_seqlens, num_tokens, name="cu_seqlens"):
    """Boundaries of packed sequences as a tuple of ints: from 0, never decreasing, ending at ``num_tokens``."""
    values = []
    for value in cu_seqlens:
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
            raise TypeError(f"{name} holds {value!r} of type {type(value).__name__}; allowed: integers")
        values.append(int(value))
    values = tuple(values)
    shown = values if len(values) <= 12 else values[:12] + ("...",)
    if len(values) < 2 or values[0] != 0:
        raise ValueError(f"{name} is {list(shown)}; allowed: at least two boundaries, the first 0")
    for i in range(1, len(values)):
        if values[i] < values[i - 1]:
            raise ValueError(f"{name} decreases at index {i} ({values[i - 1]} -> {values[i]}); allowed: non-decreasing boundaries")
    if values[-1] != num_tokens:
        raise ValueError(f"{name} ends at {values[-1]}; allowed: {num_tokens}, the number of tokens")
    return values


def check_chunk_indices(chunk_indices, cu_seqlens, chunk_size):
    """``chunk_indices`` is derived metadata, pairs (sequence, chunk) flat or ``[Nc, 2]``: it must say what ``cu_seqlens`` says."""
    if chunk_indices is None or cu_seqlens == "tensor":
        return
    if cu_seqlens is None:
        raise ValueError("chunk_indices is given without cu_seqlens; allowed: None, or together with cu_seqlens")
    expected = []
    for n in range(len(cu_seqlens) - 1):
        for c in range(-(-(cu_seqlens[n + 1] - cu_seqlens[n]) // chunk_size)):
            expected += [n, c]
    given = chunk_indices.asnumpy() if isinstance(chunk_indices, Tensor) else np.asarray(chunk_indices)
    if given.reshape(-1).tolist() != expected:
        raise ValueError(
            f"chunk_indices is {given.reshape(-1).tolist()[:12]} of {given.size} entries; allowed: None, or the {len(expected)} entries "
            f"{expected[:12]} (pairs sequence, chunk) that cu_seqlens gives"
        )


def check_tensor(name, info, dims, sizes, dtypes):
    """Check one tensor against named sizes, e.g. dims ``"B Hv T K"``; sizes that are still unknown are filled in.

    Args:
        info: ``(shape, dtype)`` or None (checked for presence by the caller).
        sizes: dict name -> int; a digit in ``dims`` is that size itself.
    """
    shape, dtype = info
    names = dims.split()
    expected = "[" + ", ".join(f"{n}={sizes[n]}" if n in sizes else n for n in names) + "]"
    if len(shape) != len(names):
        raise ValueError(f"{name} has shape {tuple(shape)} ({len(shape)} axes); allowed: {expected}")
    for axis, n in enumerate(names):
        if sizes.setdefault(n, shape[axis]) != shape[axis]:
            raise ValueError(f"{name} has shape {tuple(shape)}; allowed: {expected}")
    if str(dtype) not in dtypes:
        raise TypeError(f"{name} has dtype {dtype}; allowed: {', '.join(dtypes)}")


def token_dims(layout, head, *feature):
    """Axis names of a token tensor in ``layout``: ``token_dims("BSND", "Hv", "K") == "B T Hv K"``."""
    order = {"BNSD": ("B", head, "T"), "BSND": ("B", "T", head), "NTD": (head, "T"), "TND": ("T", head)}[layout]
    return " ".join(order + feature)


def check_inputs(layout, q, k, v, g, beta, a_log, dt_bias, initial_state, state_v_first, cu, sliced=False):
    """Shapes and dtypes of the op's inputs, each ``(shape, dtype)`` or None. Returns the sizes by name.

    ``cu``: number of packed sequences or None. ``sliced``: the tokens are one rank's slice, which may be empty and whose rows may hold
    several sequences each.
    """
    sizes = {}
    check_tensor("q", q, token_dims(layout, "Hk", "K"), sizes, STORAGE)
    check_tensor("k", k, token_dims(layout, "Hk", "K"), sizes, (str(q[1]),))
    check_tensor("v", v, token_dims(layout, "Hv", "V"), sizes, (str(q[1]),))
    if sizes["Hk"] and sizes["Hv"] % sizes["Hk"]:
        raise ValueError(f"v has Hv={sizes['Hv']} heads, q and k Hk={sizes['Hk']}; allowed: Hv a multiple of Hk")
    check_tensor("g", g, token_dims(layout, "Hv", "K"), sizes, STORAGE)
    check_tensor("beta", beta, token_dims(layout, "Hv"), sizes, STORAGE)
    sizes.setdefault("B", 1)
    for name, size in sizes.items():
        if size < 1 and not (sliced and name == "T"):
            raise ValueError(f"{'v' if name in ('Hv', 'V') else 'q'} has {name}={size}; allowed: at least 1")
    for name, arg in (("K", "q"), ("V", "v")):
        if sizes[name] > MAX_WIDTH:
            raise ValueError(f"{arg} has {name}={sizes[name]}; allowed: 1 to {MAX_WIDTH}")
    if a_log is not None:
        check_tensor("a_log", a_log, "Hv", sizes, ("Float32",))
    if dt_bias is not None:
        if len(dt_bias[0]) == 1:
            check_tensor("dt_bias", dt_bias, "Hv*K", {"Hv*K": sizes["Hv"] * sizes["K"]}, ("Float32",))
        else:
            check_tensor("dt_bias", dt_bias, "Hv K", sizes, ("Float32",))
    sizes["N"] = sizes["B"]
    if cu is not None:
        if sizes["B"] != 1 and not sliced:
            raise ValueError(f"cu_seqlens is given with B={sizes['B']}; allowed: B=1 (flatten the batch into one pack)")
        sizes["N"] = cu
        if cu < 1:
            raise ValueError(f"cu_seqlens has {cu + 1} entries; allowed: at least 2")
    if initial_state is not None:
        check_tensor("initial_state", initial_state, "N Hv V K" if state_v_first else "N Hv K V", sizes, ("Float32",))
    return sizes


def describe(x):
    """``(shape, dtype)`` of a tensor, None of None."""
    return None if x is None else (x.shape, x.dtype)


def require_tensor(name, x, optional=False):
    if optional and x is None:
        return
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} is not a Tensor but {type(x).__name__}; allowed: a Tensor" + (" or None" if optional else ""))


@constexpr(check=False)
def is_host_boundaries(cu_seqlens):
    """True for a list, tuple or NumPy array of integers."""
    return isinstance(cu_seqlens, (list, tuple, np.ndarray))


@constexpr(check=False)
def refuse_boundaries(cu_seqlens):
    """Refuse what is no boundaries at all."""
    raise TypeError(f"cu_seqlens is of type {type(cu_seqlens).__name__}; allowed: host integers (list, tuple), an int32 Tensor, or None")


__all__ = ["KdaOptions", "check_cu_seqlens", "check_inputs", "check_tensor", "describe"]
