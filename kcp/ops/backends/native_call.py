"""How MindSpore calls the native kernels: the library, its custom operators and the options tensor (``native/call.h``)."""

import ctypes
import os
import struct
from functools import lru_cache
from pathlib import Path

import numpy as np
from mindspore import Tensor, ops

LIBRARY = Path(__file__).resolve().parent / "native" / "libkcp_native.so"

# bits of the options tensor's "present" word, in the order of native/call.h
HAS_A_LOG, HAS_DT_BIAS, HAS_INITIAL_STATE, HAS_CU_SEQLENS = 1, 2, 4, 8
WANT_FINAL_STATE, HAS_CACHE, HAS_D_FINAL_STATE, WANT_M, OUT_TOKEN_MAJOR = 16, 32, 64, 128, 256


def bits(x: float) -> int:
    return struct.unpack("<q", struct.pack("<d", float(x)))[0]


def pack_options(opts, present: int, heads: tuple[int, int] = (0, 0), layout: str | None = None) -> Tensor:
    """The int64 options tensor of an entry point (positions: ``Option`` in native/call.h).

    Args:
        opts: :class:`kcp.ops.options.KdaOptions`.
        present: bits of the optional tensors that are there.
        heads: value heads to compute; (0, 0) means all.
        layout: of the token tensors, ``opts.layout`` by default.
    """
    gate = 0 if not opts.use_gate_in_kernel else 1 if opts.safe_gate else 2
    numbers = [
        (layout or opts.layout) in ("BNSD", "NTD"), gate, opts.use_qk_l2norm_in_kernel, opts.use_beta_sigmoid_in_kernel,
        opts.allow_neg_eigval, opts.state_v_first, present, *heads, bits(opts.scale), bits(opts.lower_bound), bits(opts.epsilon),
        opts.chunk_size, opts.use_exp2,
    ]  # fmt: skip
    return Tensor(np.array(numbers, np.int64))


@lru_cache(1)
def library() -> ctypes.CDLL:
    """The kernels' library, told how many threads the user asked OpenMP for.

    Importing MindSpore puts ``OMP_NUM_THREADS=1`` into the C environment where the user set none; ``os.environ`` still has the user's
    word. ``KCP_NUM_THREADS`` goes before it.
    """
    loaded = ctypes.CDLL(str(LIBRARY))
    asked = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    loaded.kcp_set_default_threads(int(asked) if asked.isdigit() else 0)
    return loaded


def custom(name, shapes, dtypes, key):
    """The operator of entry point ``name``. ``key`` tells apart operators whose outputs differ for inputs of the same shapes: MindSpore
    remembers what it inferred by name, attributes and inputs."""
    library()
    op = ops.Custom(f"{LIBRARY}:{name}", out_shape=shapes, out_dtype=dtypes, func_type="aot")
    op.add_prim_attr("kcp_options", key)
    return op


def sizes(layout, k, v):
    """``(B, T, Hv, K, V)`` from the shapes of k and v."""
    if layout in ("NTD", "TND"):
        v = [1, *v]
    heads, tokens = (v[1], v[2]) if layout in ("BNSD", "NTD") else (v[2], v[1])
    return v[0], tokens, heads, k[-1], v[-1]


def in_layout(layout, batch, heads, tokens, width):
    """Shape of a token tensor."""
    shape = (heads, tokens, width) if layout in ("BNSD", "NTD") else (tokens, heads, width)
    return shape if layout in ("NTD", "TND") else (batch, *shape)
