"""Calls the native entry points through ctypes, with NumPy arrays in place of MindSpore tensors.

bfloat16 arrays are uint16 bit patterns wrapped in :class:`BFloat16`.
"""

import ctypes
import dataclasses

import numpy as np

LANE = 32
CHUNK = 64
CACHE_HEADER = 32
SEGMENT = 32
GATES = {"none": 0, "lower_bound": 1, "softplus": 2}
PRESENT = dict(a_log=1, dt_bias=2, initial_state=4, cu_seqlens=8, final_state=16, cache=32, d_final_state=64, want_m=128)


def to_bf16(x):
    """float32 -> bits of the nearest bfloat16 (uint16)."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


@dataclasses.dataclass(frozen=True)
class Options:
    head_major: bool = False
    gate: str = "lower_bound"
    l2norm: bool = True
    beta_sigmoid: bool = True
    neg_eigval: bool = False
    state_v_first: bool = False
    scale: float = 1.0
    lower_bound: float = -5.0
    epsilon: float = 1e-6
    chunk: int = CHUNK
    use_exp2: bool = True
    heads: tuple = (0, 0)

    def pack(self, present):
        """The int64 options tensor; ``present`` names what is there."""
        real = np.array([self.scale, self.lower_bound, self.epsilon], np.float64).view(np.int64)
        flags = sum(PRESENT[name] for name in present)
        head = [self.head_major, GATES[self.gate], self.l2norm, self.beta_sigmoid, self.neg_eigval, self.state_v_first]
        return np.array([*head, flags, *self.heads, *real, self.chunk, self.use_exp2], np.int64)


class Native:
    """The shared library at ``path``."""

    def __init__(self, path):
        self.lib = ctypes.CDLL(str(path))
        self.lib.kcp_isa.restype = ctypes.c_char_p

    @property
    def isa(self):
        return self.lib.kcp_isa().decode()

    def call(self, name, arrays):
        """Run entry point ``name``; returns its code. uint16 arrays count as bfloat16."""
        arrays = list(arrays)
        n = len(arrays)
        names = {np.dtype(np.uint16): b"bfloat16"}
        data = (ctypes.c_void_p * n)(*[a.ctypes.data for a in arrays])
        ranks = (ctypes.c_int * n)(*[a.ndim for a in arrays])
        shapes = [(ctypes.c_int64 * max(a.ndim, 1))(*a.shape) for a in arrays]
        pointers = (ctypes.c_void_p * n)(*[ctypes.addressof(s) for s in shapes])
        dtypes = (ctypes.c_char_p * n)(*[names.get(a.dtype, a.dtype.name.encode()) for a in arrays])
        for a in arrays:
            assert a.flags.c_contiguous
        return getattr(self.lib, name)(n, data, ranks, pointers, dtypes, None, None)


def padded(width):
    return -(-width // LANE) * LANE


def token_major(x, head_major):
    return np.ascontiguousarray(np.swapaxes(x, 1, 2)) if head_major else x


class Problem:
    """One set of inputs (token-major float32 arrays) with everything the entry points need and produce."""

    def __init__(self, native, inputs, options, cache=True, dtype=np.float32):
        self.native, self.o, self.x = native, options, inputs
        self.store = {np.float32: np.ascontiguousarray, np.float16: lambda a: a.astype(np.float16), "bfloat16": to_bf16}[dtype]
        self.empty_dtype = np.uint16 if dtype == "bfloat16" else dtype
        batch, tokens, key_heads, key = inputs["q"].shape
        heads, value = inputs["v"].shape[2:]
        self.batch, self.tokens, self.key_heads, self.key, self.heads, self.value = batch, tokens, key_heads, key, heads, value
        self.group = heads // key_heads
        cu = inputs.get("cu_seqlens")
        lengths = np.diff(cu) if cu is not None else np.full(batch, tokens)
        self.sequences = len(lengths)
        begin, end = options.heads
        self.range = (end - begin) if end else heads
        chunks = int(np.sum(-(-lengths // options.chunk)))
        slot = padded(key) * padded(value) + options.chunk * (padded(value) + 2 * CHUNK)
        self.with_cache = cache
        states = int(np.sum((lengths - 1).clip(0) // (SEGMENT * options.chunk))) * key * value
        self.cache = np.full(self.range * chunks * slot + CACHE_HEADER if cache else max(1, self.range * states), np.nan, np.float32)

    def _in(self, name):
        x = self.store(self.x[name])
        return np.ascontiguousarray(np.swapaxes(x, 1, 2)) if self.o.head_major else x

    def _out(self, heads, *width):
        shape = (self.batch, heads, self.tokens) if self.o.head_major else (self.batch, self.tokens, heads)
        x = np.zeros(shape + width, self.empty_dtype)
        x[...] = 0x7FC0 if self.empty_dtype == np.uint16 else np.nan
        return x

    def _get(self, x):
        x = from_bf16(x) if x.dtype == np.uint16 else x.astype(np.float32)
        return x

    def _inputs(self, state, present):
        dummy = np.zeros(1, np.float32)
        optional = [self.x.get(n, dummy) for n in ("a_log", "dt_bias", state)]
        cu = self.x.get("cu_seqlens", np.zeros(1, np.int32))
        present = [n for n in ("a_log", "dt_bias", "cu_seqlens", state) if n in self.x] + list(present)
        first = [self._in(n) for n in ("q", "k", "v", "g", "beta")]
        return [self.o.pack(present), *first, *optional, np.ascontiguousarray(cu, np.int32)]

    def state_shape(self):
        kv = (self.value, self.key) if self.o.state_v_first else (self.key, self.value)
        return (self.sequences, self.range, *kv)

    def forward(self):
        inputs = self._inputs("initial_state", ["final_state"] + (["cache"] if self.with_cache else []))
        out = np.zeros((self.batch, self.tokens, self.range, self.value), self.empty_dtype)
        out[...] = 0x7FC0 if self.empty_dtype == np.uint16 else np.nan
        final = np.full(self.state_shape(), np.nan, np.float32)
        assert self.native.call("kcp_forward", [*inputs, out, final, self.cache]) == 0
        return {"out": self._get(out), "final_state": final}

    def backward(self):
        present = (["cache"] if self.with_cache else []) + (["d_final_state"] if "d_final_state" in self.x else [])
        inputs = self._inputs("initial_state", present)
        d_final = self.x.get("d_final_state", np.zeros(1, np.float32))
        keys = self.range // self.group
        dq, dk = self._out(keys, self.key), self._out(keys, self.key)
        dv, dg, dbeta = self._out(self.range, self.value), self._out(self.range, self.key), self._out(self.range)
        da_log = np.full(self.range if "a_log" in self.x else 1, np.nan, np.float32)
        ddt_bias = np.full((self.range, self.key) if "dt_bias" in self.x else (1, 1), np.nan, np.float32)
        d_initial = np.full(self.state_shape() if "initial_state" in self.x else 1, np.nan, np.float32)
        d_out = self.store(self.x["d_out"])
        outputs = [dq, dk, dv, dg, dbeta, da_log, ddt_bias, d_initial]
        assert self.native.call("kcp_backward", [*inputs, d_out, d_final, self.cache, *outputs]) == 0
        got = {n: token_major(self._get(a), self.o.head_major) for n, a in dict(dq=dq, dk=dk, dv=dv, dg=dg, dbeta=dbeta).items()}
        got.update(da_log=da_log, ddt_bias=ddt_bias, d_initial_state=d_initial)
        return got

    def summary(self, want_m=True):
        inputs = self._inputs("initial_state", ["want_m"] if want_m else [])
        width = self.value + (self.key if want_m else 0)
        to = np.full((self.sequences, self.range, self.key, width), np.nan, np.float32)
        assert self.native.call("kcp_summary", [*inputs, to]) == 0
        return to

    def backward_summary(self):
        inputs = self._inputs("d_final_state", ["cache"] if self.with_cache else [])
        to = np.full(self.state_shape(), np.nan, np.float32)
        d_out = self.store(self.x["d_out"])
        assert self.native.call("kcp_backward_summary", [*inputs, d_out, self.cache, to]) == 0
        return to
