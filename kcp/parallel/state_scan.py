"""State scan: one all-gather of affine summaries, a prefix to this rank's incoming state, then the local op (section 6.3 of the seed).

    forward    local summary [E | M] -> all-gather -> prefix -> local forward from the incoming state
    backward   local dE -> all-gather -> suffix with dM = M^T kept from the forward -> local backward

What is exchanged does not depend on the number of tokens. A rank whose incoming state is known (a slice that starts a document, rank 0)
computes its outgoing state alone, E without M; a rank where a document ends computes dE without dM (``documents.py`` has the rules). So
the initial state and the final state's gradient are in the first rank's E and the last rank's dE, and prefix and suffix start from zero, as
Hyper-Parallel's merge kernel does. The last rank's forward and the first rank's backward summary are never needed; those ranks send zeros.

Ranks run different graphs, and a graph orders its collectives by data alone: ``ops.depend`` ties each exchange to the one before it.

Shapes: B rows, N documents, L of them on this rank, H value heads; states ``[*, H, K, V]`` are K-first here, float32.
"""

import mindspore as ms
from mindspore import ops

from kcp.ops.layouts import transpose_state
from kcp.parallel import summary
from kcp.parallel.documents import (
    CONTINUES,
    EMPTY,
    ENDING,
    FIRST,
    LAST,
    LOCAL_BOUNDARIES,
    OPEN,
    PICK,
    ROW,
    STARTING,
    THROUGH,
    mixed,
    placed,
)
from kcp.parallel.gradients import reduce_gate_parameters
from kcp.parallel.traffic import FINAL_STATE, INITIAL_STATE, STATE


@ms.jit_class
class StateScan:
    """The strategy for KDA, explicit forward and backward.

    Args:
        opts: options of the local op: K-first states, always an initial state, local boundaries.
        backend: serves the local op.
        group: the ranks.
        documents: what this rank holds.
        reduced_by: who reduces the gradients of a_log and dt_bias.
        has_initial_state: whether initial states are given.
        state_v_first: axis order of the public states.
        keep_transitions: keep the gathered M of the forward for the backward.
    """

    def __init__(self, opts, backend, group, documents, reduced_by, has_initial_state, state_v_first, keep_transitions):
        self.opts = opts
        self.backend = backend
        self.group = group
        self.documents = documents
        self.reduced_by = reduced_by
        self.has_initial_state = has_initial_state
        self.state_v_first = state_v_first
        self.keep_transitions = keep_transitions
        self.prefix = getattr(backend, "prefix", summary.prefix)
        self.suffix = getattr(backend, "suffix", summary.suffix)
        self.is_first = group.rank == 0
        self.is_last = group.rank == group.size - 1
        self.no_tokens = documents.num_tokens == 0

    def _flat(self, x):
        """Rows one after the other, ``[B, T, ...] -> [1, B T, ...]``, unless every row is one sequence of the local op."""
        return x if self.documents.dense else x.reshape((1, x.shape[0] * x.shape[1]) + x.shape[2:])

    def _unflat(self, x):
        if self.documents.dense:
            return x
        return x.reshape((self.documents.num_rows, x.shape[1] // self.documents.num_rows) + x.shape[2:])

    def _send_forward(self, q, k, v, g, beta, a_log, dt_bias, index, h0, opened):
        """``[B, H, K, V + K]``, this rank's ``[E | M]``."""
        docs, heads, width, value_width = self.documents, v.shape[2], q.shape[3], v.shape[3]
        zeros = ops.zeros((docs.num_rows, heads, width, value_width + width), ms.float32)
        if self.is_last:
            return zeros
        if self.no_tokens:
            return summary.identity(docs.num_rows, heads, width, value_width)
        cu = index[LOCAL_BOUNDARIES]
        if docs.all_through:
            return self.backend.forward_summary(self.opts, q, k, v, g, beta, a_log, dt_bias, cu, opened)
        start = h0 * (1.0 - index[CONTINUES]) if docs.any_continues else h0
        if docs.any_through:  # some rows or packings need M: E from a known state follows from it
            last = ops.gather(self.backend.forward_summary(self.opts, q, k, v, g, beta, a_log, dt_bias, cu, opened), index[LAST], 0)
            e, m = summary.apply(last, ops.gather(start, index[LAST], 0)), last[..., value_width:] * index[THROUGH]
        else:
            ends = self.backend.forward_end(self.opts, q, k, v, g, beta, a_log, dt_bias, start, cu, opened)
            e, m = ops.gather(ends, index[LAST], 0), zeros[..., value_width:]
        return ops.concat((e, m), -1)

    def _exchange_forward(self, own, value_width):
        """``(state that crosses into this rank, transitions to keep, what later exchanges are tied to)``."""
        gathered = self.group.collectives.all_gather(own, STATE)
        crossing = own[..., :value_width]
        if self.documents.any_continues:
            crossing = self.prefix(gathered, self.group.rank, ops.zeros(crossing.shape, ms.float32))
        return crossing, gathered[..., value_width:], gathered

    def _exchange_backward(self, own, transitions, value_width):
        """``(state gradient that crosses into this rank, what later exchanges are tied to)``; transitions as kept, or None."""
        gathered = self.group.collectives.all_gather(own, STATE)
        crossing = own[..., :value_width]
        if self.documents.any_open:
            d_m = gathered[..., value_width:] if transitions is None else ops.swapaxes(transitions, -1, -2)
            none = ops.zeros(crossing.shape, ms.float32)
            crossing = self.suffix(gathered[..., :value_width], d_m, self.group.rank, none)
        return crossing, gathered

    def forward(self, q, k, v, g, beta, a_log, dt_bias, initial_state, cu, output_final_state):
        """This rank's tokens in and out (BSND); ``(out, final_state, saved)``, saved = local initial states, transitions, local caches."""
        docs, heads, width, value_width = self.documents, v.shape[2], q.shape[3], v.shape[3]
        index = docs.index(cu)
        if self.has_initial_state:
            states = transpose_state(initial_state, self.state_v_first)
        else:
            states = ops.zeros((docs.num_documents, heads, width, value_width), ms.float32)
        q, k, v, g, beta = self._flat(q), self._flat(k), self._flat(v), self._flat(g), self._flat(beta)
        opened, h0 = (), states[:1]
        if not self.no_tokens:
            h0 = ops.gather(states, index[PICK], 0)
            opened = self.backend.forward_open(self.opts, q, k, v, g, beta, a_log, dt_bias, index[LOCAL_BOUNDARIES])
        own = self._send_forward(q, k, v, g, beta, a_log, dt_bias, index, h0, opened)
        crossing, transitions, tied = self._exchange_forward(ops.depend(own, q), value_width)
        out, final_state, saved = v, ops.zeros(states.shape, ms.float32), ()
        if not self.no_tokens:
            if docs.any_continues:
                h0 = mixed(h0, crossing, index[CONTINUES], index[ROW])
            h0 = ops.depend(h0 * 1.0, tied)
            out, ends, saved = self.backend.forward_close(self.opts, q, k, v, g, beta, a_log, dt_bias, h0, index[LOCAL_BOUNDARIES], opened)
            final_state = placed(ends, index[ENDING])
        else:
            out = ops.depend(v * 1.0, tied)
        if docs.any_empty:
            final_state = final_state + states * index[EMPTY]
        if output_final_state:
            final_state = self.group.collectives.all_reduce(ops.depend(final_state, out), FINAL_STATE)
            out = ops.depend(out, final_state)
        boundary = (h0, transitions) if self.keep_transitions else (h0,)
        return self._unflat(out), transpose_state(final_state, self.state_v_first), boundary + saved

    def _send_backward(self, q, v, index, d_ends, caches, opened):
        """``[B, H, K, V]``, this rank's dE, or ``[dE | dM]`` where the transitions were not kept."""
        docs, heads, width, value_width = self.documents, v.shape[2], q.shape[3], v.shape[3]
        zeros = ops.zeros((docs.num_rows, heads, width, value_width + width), ms.float32)
        if self.no_tokens or self.is_first:
            if self.keep_transitions:
                return zeros[..., :value_width]
            return zeros if self.is_first else summary.identity(docs.num_rows, heads, width, value_width)
        cu = index[LOCAL_BOUNDARIES]
        if docs.all_through and not self.keep_transitions:
            return self.backend.backward_summary(self.opts, q, cu, caches, opened)
        end = d_ends * (1.0 - index[OPEN]) if docs.any_open else d_ends
        if docs.any_through and not self.keep_transitions:
            first = ops.gather(self.backend.backward_summary(self.opts, q, cu, caches, opened), index[FIRST], 0)
            d_e = summary.apply(first, ops.gather(end, index[FIRST], 0))
            return ops.concat((d_e, first[..., value_width:] * index[THROUGH]), -1)
        d_e = ops.gather(self.backend.backward_end(self.opts, q, cu, caches, opened, end), index[FIRST], 0)
        return d_e if self.keep_transitions else ops.concat((d_e, zeros[..., value_width:]), -1)

    def backward(self, q, k, v, g, beta, a_log, dt_bias, initial_state, cu, saved, d_out, d_final):
        """Gradients of this rank's tokens, partial (or reduced) parameter gradients, the whole initial-state gradient."""
        docs, collectives, value_width = self.documents, self.group.collectives, v.shape[3]
        index = docs.index(cu)
        kept = 2 if self.keep_transitions else 1
        h0 = saved[0]
        shape = (docs.num_documents,) + h0.shape[1:]
        q, k, v, g, beta = self._flat(q), self._flat(k), self._flat(v), self._flat(g), self._flat(beta)
        if d_final is not None:
            grads = transpose_state(collectives.all_reduce(d_final, FINAL_STATE), self.state_v_first)
        else:
            grads = ops.depend(ops.zeros(shape, ms.float32), q)
        caches, opened, d_ends = (), (), grads[:1]
        if not self.no_tokens:
            d_ends = ops.gather(grads, index[PICK], 0)
            d_out = None if d_out is None else self._flat(d_out)
            caches, opened = self.backend.backward_open(
                self.opts, q, k, v, g, beta, a_log, dt_bias, h0, index[LOCAL_BOUNDARIES], saved[kept:], d_out
            )
        own = ops.depend(self._send_backward(q, v, index, d_ends, caches, opened), grads)
        crossing, exchanged = self._exchange_backward(own, saved[1] if self.keep_transitions else None, value_width)
        if self.no_tokens:
            dq, dk, dv, dg, dbeta = q * 0.0, k * 0.0, v * 0.0, g * 0.0, beta * 0.0
            dq, da_log, ddt_bias = ops.depend(dq, exchanged), a_log * 0.0, dt_bias * 0.0
            dh0 = ops.zeros(shape, ms.float32)
        else:
            if docs.any_open:
                d_ends = mixed(d_ends, crossing, index[OPEN], index[ROW])
            d_ends = ops.depend(d_ends * 1.0, exchanged)
            dq, dk, dv, dg, dbeta, da_log, ddt_bias, d_starts = self.backend.backward_close(
                self.opts, q, k, v, g, beta, a_log, dt_bias, h0, index[LOCAL_BOUNDARIES], caches, opened, d_ends
            )
            dh0 = placed(d_starts, index[STARTING])
        da_log, ddt_bias, dq = reduce_gate_parameters(self.opts, da_log, ddt_bias, dq, collectives, self.reduced_by)
        if self.has_initial_state:
            if docs.any_empty:
                dh0 = dh0 + grads * index[EMPTY]
            dh0 = collectives.all_reduce(ops.depend(dh0, dq), INITIAL_STATE)
            dq = ops.depend(dq, dh0)
            dh0 = transpose_state(dh0, self.state_v_first)
        else:
            dh0 = initial_state - initial_state
        return self._unflat(dq), self._unflat(dk), self._unflat(dv), self._unflat(dg), self._unflat(dbeta), da_log, ddt_bias, dh0
