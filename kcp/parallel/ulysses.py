"""Ulysses: all-to-all from sequence slices to head slices, the whole-sequence op on the local heads, and back.

    rank r before: tokens of slice r, all heads        rank r inside: all tokens, heads r H/W .. (r+1) H/W

Hk and Hv must be divisible by the group's size. ``a_log`` and ``dt_bias`` are sliced to the local heads, an initial state too; a final
state is gathered. The two exchanges are each other's inverse and each other's adjoint.
"""

import mindspore as ms
from mindspore import Tensor, nn, ops

from kcp.parallel.boundaries import flat_tensor_rows
from kcp.parallel.gradients import reduce_gate_parameters
from kcp.parallel.traffic import FINAL_STATE, HEADS, INITIAL_STATE


def sequence_to_heads(x: Tensor, group) -> Tensor:
    """``[B, T_local, H, D] -> [B, T, H / W, D]`` (D may be absent)."""
    lengths = group.lengths(x.shape[1])
    longest = group.longest(x.shape[1])
    if x.shape[1] < longest:
        x = ops.concat((x, ops.zeros((x.shape[0], longest - x.shape[1]) + x.shape[2:], x.dtype)), 1)
    shape = x.shape
    share = (shape[2] // group.size,) + shape[3:]
    x = x.reshape((shape[0], longest, group.size) + share)
    received = group.collectives.all_to_all(x, HEADS, 2)
    if shape[0] == 1 and group.slice_lengths is None:
        return received.reshape((1, group.size * longest) + share)
    parts = []
    for r in range(group.size):
        parts.append(received[r][:, : lengths[r]])
    return ops.concat(tuple(parts), 1)


def heads_to_sequence(x: Tensor, group, local_tokens: int) -> Tensor:
    """``[B, T, H / W, D] -> [B, T_local, H, D]`` (D may be absent)."""
    if x.shape[0] == 1 and group.slice_lengths is None:
        received = group.collectives.all_to_all(x.reshape((1, group.size, local_tokens) + x.shape[2:]), HEADS, 1)
    else:
        received = group.collectives.all_to_all(_by_rank(x, group, local_tokens), HEADS, 0)
    heads = []
    for r in range(group.size):
        heads.append(received[r][:, :local_tokens])
    return ops.concat(tuple(heads), 2)


def _by_rank(x, group, local_tokens):
    """``[B, T, ...] -> [W, B, longest slice, ...]``, zeros where a slice is shorter."""
    lengths = group.lengths(local_tokens)
    longest = group.longest(local_tokens)
    pieces, begin = [], 0
    for r in range(group.size):
        piece = x[:, begin : begin + lengths[r]]
        if lengths[r] < longest:
            piece = ops.concat((piece, ops.zeros((x.shape[0], longest - lengths[r]) + x.shape[2:], x.dtype)), 1)
        pieces.append(ops.expand_dims(piece, 0))
        begin += lengths[r]
    return ops.concat(tuple(pieces), 0)


class SequenceToHeads(nn.Cell):
    """Differentiable :func:`sequence_to_heads`."""

    def __init__(self, group):
        super().__init__(auto_prefix=False)
        self.group = group

    def construct(self, x):
        return sequence_to_heads(x, self.group)

    def bprop(self, x, out, dout):
        return (heads_to_sequence(ops.depend(dout, out), self.group, x.shape[1]),)


class HeadsToSequence(nn.Cell):
    """Differentiable :func:`heads_to_sequence`; ``like`` is any tensor ``[B, T_local, ...]`` of this rank (not differentiated)."""

    def __init__(self, group):
        super().__init__(auto_prefix=False)
        self.group = group

    def construct(self, x, like):
        return heads_to_sequence(x, self.group, like.shape[1])

    def bprop(self, x, like, out, dout):
        return sequence_to_heads(ops.depend(dout, out), self.group), ops.zeros(like.shape, like.dtype)


class ContextParallel(nn.Cell):
    """Ulysses around any core attention: ``core(*tensors, *extras)`` sees all tokens and 1 / W of the heads.

    Args:
        core: Cell mapping token tensors ``[B, T, H_i, D_i]`` (or ``[B, T, H_i]``) to ``[B, T, H, D]``.
        group: the :class:`~kcp.parallel.group.CpGroup`.
        num_token_inputs: how many leading inputs are sliced along the sequence and exchanged; the rest goes to ``core`` as it is.

    Inputs:
        token tensors of this rank's slice, sequence axis 1, head axis 2.

    Outputs:
        ``core``'s result for this rank's tokens and all heads, ``[B, T_local, H, D]``.

    Raises:
        ValueError: a head axis is not divisible by the group's size, or has the wrong rank.
    """

    def __init__(self, core: nn.Cell, group, num_token_inputs: int):
        super().__init__()
        self.core = core
        self.group = group
        self.num_token_inputs = num_token_inputs
        self.to_heads = SequenceToHeads(group)
        self.to_sequence = HeadsToSequence(group)

    def construct(self, *inputs):
        exchanged = ()
        for i in range(self.num_token_inputs):
            _check_token_tensor(inputs[i].shape, i, self.group.size)
            exchanged = exchanged + (self.to_heads(inputs[i]),)
        out = self.core(*exchanged, *inputs[self.num_token_inputs :])
        return self.to_sequence(out, inputs[0])


def _check_token_tensor(shape, position, size):
    if len(shape) not in (3, 4) or shape[2] % size:
        raise ValueError(f"input {position} has shape {shape}; allowed: [B, T_local, H, D] or [B, T_local, H] with H a multiple of {size}")


@ms.jit_class
class Ulysses:
    """The strategy for KDA, explicit forward and backward.

    Args:
        opts: options of the whole-sequence op on the local heads.
        backend: serves it.
        group: the ranks.
        reduced_by: who reduces the gradients of a_log and dt_bias.
        num_rows: B.
    """

    def __init__(self, opts, backend, group, reduced_by: str, num_rows: int):
        self.opts = opts
        self.backend = backend
        self.group = group
        self.stateless_forward = getattr(backend, "op_stateless_forward", getattr(backend, "op_forward", None))
        self.reduced_by = reduced_by
        self.num_rows = num_rows
        self.everyone = group.collectives  # over whom the parameters' gradients are summed
        self.flat = opts.cu_seqlens is not None and num_rows > 1

    def _boundaries(self, cu, num_tokens):
        """Boundary Tensor of the flattened rows."""
        return flat_tensor_rows(cu, num_tokens) if self.flat and self.opts.cu_seqlens == "tensor" else cu

    def _flatten(self, x):
        """Rows of packed documents one after the other: ``[B, T, ...] -> [1, B T, ...]``."""
        return x.reshape((1, x.shape[0] * x.shape[1]) + x.shape[2:]) if self.flat else x

    def _unflatten(self, x):
        return x.reshape((self.num_rows, x.shape[1] // self.num_rows) + x.shape[2:]) if self.flat else x

    def _exchange_in(self, q, k, v, g, beta, a_log, dt_bias, initial_state):
        """Inputs for the local heads, one exchange each: together they would have to be joined and taken apart."""
        q = sequence_to_heads(q, self.group)
        k = sequence_to_heads(ops.depend(k, q), self.group)
        v = sequence_to_heads(ops.depend(v, k), self.group)
        g = sequence_to_heads(ops.depend(g, v), self.group)
        beta = sequence_to_heads(ops.depend(beta, g), self.group)
        a_log, dt_bias, initial_state = self._local_parameters(a_log, dt_bias, initial_state, v.shape[2])
        q, k, v, g, beta = self._flatten(q), self._flatten(k), self._flatten(v), self._flatten(g), self._flatten(beta)
        return q, k, v, g, beta, a_log, dt_bias, initial_state

    def _local_parameters(self, a_log, dt_bias, initial_state, local_heads):
        """What belongs to this rank's heads."""
        begin, end = self.group.rank * local_heads, (self.group.rank + 1) * local_heads
        if self.opts.has_a_log:
            a_log = a_log[begin:end]
        if self.opts.has_dt_bias:
            dt_bias = dt_bias.reshape((self.group.size * local_heads, -1))[begin:end]
        if self.opts.has_initial_state:
            initial_state = initial_state[:, begin:end]
        return a_log, dt_bias, initial_state

    def _gather_heads(self, state, purpose):
        """``[N, H / W, ...] -> [N, H, ...]`` on every rank."""
        parts = self.group.collectives.all_gather(state, purpose)
        heads = []
        for r in range(self.group.size):
            heads.append(parts[r])
        return ops.concat(tuple(heads), 1)

    def _spread_heads(self, grad):
        """Gradient of this rank's heads of a parameter ``[H / W, ...]`` -> ``[H, ...]``, zero for the others'."""
        before = ops.zeros((self.group.rank * grad.shape[0],) + grad.shape[1:], grad.dtype)
        after = ops.zeros(((self.group.size - 1 - self.group.rank) * grad.shape[0],) + grad.shape[1:], grad.dtype)
        parts = []
        if self.group.rank > 0:
            parts.append(before)
        parts.append(grad)
        if self.group.rank < self.group.size - 1:
            parts.append(after)
        return ops.concat(tuple(parts), 0)

    def _local_forward(self, inputs, cu, output_final_state):
        """The op on the local heads: ``(out, final_state, caches)``."""
        q, k, v, g, beta, a_log, dt_bias, initial_state = inputs
        cu = self._boundaries(cu, v.shape[1] // self.num_rows)
        forward = self.backend.op_forward if output_final_state else self.stateless_forward
        return forward(self.opts, q, k, v, g, beta, a_log, dt_bias, initial_state, cu)

    def _local_backward(self, inputs, cu, caches, d_out, d_final):
        """Its eight gradients."""
        q, k, v, g, beta, a_log, dt_bias, initial_state = inputs
        cu = self._boundaries(cu, v.shape[1] // self.num_rows)
        return self.backend.op_backward(self.opts, q, k, v, g, beta, a_log, dt_bias, initial_state, cu, caches, d_out, d_final)

    def forward(self, q, k, v, g, beta, a_log, dt_bias, initial_state, cu, output_final_state):
        """This rank's tokens in and out (BSND); ``(out, final_state, saved)``, saved = the exchanged inputs, local caches."""
        local_tokens = v.shape[1]
        inputs = self._exchange_in(q, k, v, g, beta, a_log, dt_bias, initial_state)
        out, final_state, saved = self._local_forward(inputs, cu, output_final_state)
        if output_final_state:
            final_state = self._gather_heads(final_state, FINAL_STATE)
            out = ops.depend(out, final_state)
        return heads_to_sequence(self._unflatten(out), self.group, local_tokens), final_state, inputs[:5] + saved

    def backward(self, q, k, v, g, beta, a_log, dt_bias, initial_state, cu, saved, d_out, d_final):
        """Gradients of this rank's tokens, partial (or reduced) parameter gradients, the whole initial-state gradient."""
        local_tokens, whole_bias = v.shape[1], dt_bias.shape
        lq, lk, lv, lg, lbeta = saved[:5]
        a_log, dt_bias, initial_state = self._local_parameters(a_log, dt_bias, initial_state, lv.shape[2])
        if d_out is not None:
            d_out = self._flatten(sequence_to_heads(ops.depend(d_out, q), self.group))
        if d_final is not None:
            if d_out is not None:
                d_final = ops.depend(d_final, d_out)
            begin = self.group.rank * lv.shape[2]
            d_final = self.group.collectives.all_reduce(d_final, FINAL_STATE)[:, begin : begin + lv.shape[2]]
        inputs = (lq, lk, lv, lg, lbeta, a_log, dt_bias, initial_state)
        dq, dk, dv, dg, dbeta, da_log, ddt_bias, dh0 = self._local_backward(inputs, cu, saved[5:], d_out, d_final)
        dq, dk, dv, dg, dbeta = (
            self._unflatten(dq), self._unflatten(dk), self._unflatten(dv), self._unflatten(dg), self._unflatten(dbeta)
        )  # fmt: skip
        dq = heads_to_sequence(dq, self.group, local_tokens)
        dk = heads_to_sequence(ops.depend(dk, dq), self.group, local_tokens)
        dv = heads_to_sequence(ops.depend(dv, dk), self.group, local_tokens)
        dg = heads_to_sequence(ops.depend(dg, dv), self.group, local_tokens)
        dbeta = heads_to_sequence(ops.depend(dbeta, dg), self.group, local_tokens)
        dq = ops.depend(dq, dbeta)
        if self.opts.has_a_log:
            da_log = self._spread_heads(da_log)
        if self.opts.has_dt_bias:
            ddt_bias = self._spread_heads(ddt_bias).reshape(whole_bias)
        da_log, ddt_bias, dq = reduce_gate_parameters(self.opts, da_log, ddt_bias, dq, self.everyone, self.reduced_by)
        if self.opts.has_initial_state:
            dh0 = self._gather_heads(ops.depend(dh0, dq), INITIAL_STATE)
            dq = ops.depend(dq, dh0)
        return dq, dk, dv, dg, dbeta, da_log, ddt_bias, dh0
