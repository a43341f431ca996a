"""PTP scan as a chain: every rank passes its outgoing state to the next one, in groups of heads, while the next group is computed.

    forward    rank 0: group 0, group 1, ...      rank 1: (state of group 0 arrives) group 0, group 1, ...
    backward   the same with state gradients, from the last rank to rank 0

No summary is made and nothing is computed twice: the arithmetic is that of one device, bit for bit where slices are cut at chunk borders. A
message is K V numbers a head; with G groups (times rows) and W ranks of equal slices the time is (G + W - 1) / G of the ideal. A state
crosses a border only inside a document: elsewhere nothing is sent and nobody waits (with boundaries in a Tensor all borders are crossed).
A rank without tokens passes on what it gets.

In graph mode there is no point to point: the messages go in G + W - 2 rounds of all ranks (``Collectives.round``), each tied to the one
before it. Rounds change what is moved, not what is computed.

Shapes: states ``[*, H, K, V]`` are K-first here, float32; a unit is one row and one group of heads.
"""

from dataclasses import replace

import mindspore as ms
from mindspore import ops

from kcp.ops.layouts import transpose_state
from kcp.parallel import chain
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
    HostDocuments,
    TensorDocuments,
    mixed,
    placed,
)
from kcp.parallel.gradients import reduce_gate_parameters
from kcp.parallel.traffic import FINAL_STATE, INITIAL_STATE, STATE

WORK, RECV = chain.WORK, chain.RECV


class RowParts:
    """What one rank holds of every row: documents of the whole slice, and of the parts that the local op runs on."""

    def __init__(self, whole: tuple, parts: tuple, enters: tuple, leaves: tuple):
        self.whole, self.parts = whole, parts
        self.enters, self.leaves = enters, leaves

    @staticmethod
    def from_rows(rows: tuple, begin: int, end: int, is_first: bool) -> "RowParts":
        """From boundaries known as integers, one tuple a row."""
        whole = tuple(HostDocuments((row,), begin, end, is_first) for row in rows)
        parts = tuple(tuple(HostDocuments((row,), b, e, False) for b, e in chain.split_slice(row, begin, end)) for row in rows)
        return RowParts(whole, parts, tuple(chain.crosses(r, begin) for r in rows), tuple(chain.crosses(r, end) for r in rows))

    @staticmethod
    def from_tensor(num_rows: int, documents_per_row: int, begin: int, end: int, is_first: bool, is_last: bool) -> "RowParts":
        """From the shape of a boundary Tensor."""
        whole = (TensorDocuments(1, documents_per_row, begin, end, is_first),) * num_rows
        parts = tuple((documents,) if end > begin else () for documents in whole)
        return RowParts(whole, parts, (not is_first,) * num_rows, (not is_last,) * num_rows)


def _joined(parts: tuple, axis: int):
    return parts[0] if len(parts) == 1 else ops.concat(parts, axis)


@ms.jit_class
class PtpChain:
    """The strategy for KDA, explicit forward and backward.

    Args:
        opts: options of the local op: K-first states, always an initial state; boundaries are set here.
        backend: serves the local op.
        group: the ranks.
        rows: a :class:`RowParts`.
        num_groups: head groups, a divisor of the key heads.
        reduced_by: who reduces the gradients of a_log and dt_bias.
        has_initial_state: whether initial states are given.
        state_v_first: axis order of the public states.
        point_to_point: whether the ranks can send and receive; else they go by rounds.
    """

    def __init__(self, opts, backend, group, rows, num_groups, reduced_by, has_initial_state, state_v_first, point_to_point):
        self.opts = opts
        self.backend = backend
        self.group = group
        self.num_groups = num_groups
        self.reduced_by = reduced_by
        self.has_initial_state = has_initial_state
        self.state_v_first = state_v_first
        self.num_rows = len(rows.whole)
        self.whole, self.parts = rows.whole, rows.parts
        self.num_parts = tuple(len(parts) for parts in rows.parts)
        self.part_opts = tuple(
            tuple(replace(opts, cu_seqlens="tensor" if opts.cu_seqlens == "tensor" else part.local_boundaries) for part in parts)
            for parts in rows.parts
        )
        self.point_to_point = point_to_point
        self.has_tokens = self.num_parts[0] > 0
        self.any_empty = any(documents.any_empty for documents in rows.whole)
        counts = [documents.num_documents for documents in rows.whole]
        self.first_document = tuple(sum(counts[:b]) for b in range(self.num_rows + 1))
        self.first_token = tuple((0,) + ((parts[0].num_tokens,) if len(parts) > 1 else ()) for parts in rows.parts)
        rank, size = group.rank, group.size
        by_row = (self.num_parts, rows.enters, rows.leaves)
        units, enters, leaves = (tuple(x for x in row for _ in range(num_groups)) for row in by_row)
        self.saving_order = tuple(tuple(sum(units[:u]) + p for p in range(n)) for u, n in enumerate(units))
        if point_to_point:
            self.forward_schedule = chain.direct(units, enters, leaves, False)
            self.backward_schedule = chain.direct(units, leaves, enters, True)
        else:
            self.forward_schedule = chain.rounds(units, enters, leaves, False, rank, size)
            self.backward_schedule = chain.rounds(units, leaves, enters, True, size - 1 - rank, size)

    # ---- slices of a unit: row b, group j of the heads, one part of the row's slice

    def _tokens(self, x, unit, part):
        """``[B, T, H, ...] -> [1, T_part, H / G, ...]``."""
        b, j = unit // self.num_groups, unit % self.num_groups
        begin, heads = self.first_token[b][part], x.shape[2] // self.num_groups
        return x[b : b + 1, begin : begin + self.parts[b][part].num_tokens, j * heads : (j + 1) * heads]

    def _heads(self, x, unit, axis):
        """The unit's heads of a tensor with a head axis 0 or 1."""
        j = unit % self.num_groups
        heads = x.shape[axis] // self.num_groups
        return x[:, j * heads : (j + 1) * heads] if axis else x[j * heads : (j + 1) * heads]

    def _states(self, states, unit):
        """``[N, H, K, V] -> [N_row, H / G, K, V]``."""
        b = unit // self.num_groups
        return self._heads(states[self.first_document[b] : self.first_document[b + 1]], unit, 1)

    def _inputs(self, q, k, v, g, beta, a_log, dt_bias, unit, part):
        """The op's inputs before its initial state."""
        q, k, v = self._tokens(q, unit, part), self._tokens(k, unit, part), self._tokens(v, unit, part)
        g, beta = self._tokens(g, unit, part), self._tokens(beta, unit, part)
        if self.opts.has_a_log:
            a_log = self._heads(a_log, unit, 0)
        if self.opts.has_dt_bias:
            dt_bias = self._heads(dt_bias.reshape((self.num_groups * v.shape[2], q.shape[3])), unit, 0)
        return q, k, v, g, beta, a_log, dt_bias

    def _index(self, cu):
        """Tables of every row's whole slice, then of every part."""
        whole, parts = (), ()
        for b in range(self.num_rows):
            row = cu
            if self.opts.cu_seqlens == "tensor":
                row = cu.reshape((self.num_rows, -1))[b]
            whole = whole + (self.whole[b].index(row),)
            tables = ()
            for p in range(self.num_parts[b]):
                tables = tables + (self.parts[b][p].index(row),)
            parts = parts + (tables,)
        return whole, parts

    # ---- messages

    def _shape(self, q, v):
        return (1, v.shape[2] // self.num_groups, q.shape[3], v.shape[3])

    def _message(self, step, payload, target, source, received):
        """A step of point to point; returns what was received so far."""
        if step[0] == RECV:
            return received + (self.group.collectives.recv(payload.shape, source, STATE),)
        self.group.collectives.send(payload, target, STATE)
        return received

    def _round(self, step, payload, tied, source, received):
        """One round; returns ``(what was received so far, what comes next is tied to)``."""
        arrived = self.group.collectives.round(ops.depend(payload, tied), source if step[4] >= 0 else self.group.rank, STATE)
        return (received + (arrived,) if step[4] >= 0 else received), arrived

    # ---- forward

    def _forward_work(self, inputs, states, index, step, none, received):
        """``(out, final states by number, outgoing state, initial states, caches)`` of one part of a unit."""
        q, k, v, g, beta, a_log, dt_bias = inputs
        unit, part = step[1], step[2]
        docs, opts = self.parts[unit // self.num_groups][part], self.part_opts[unit // self.num_groups][part]
        table = index[1][unit // self.num_groups][part]
        bounds = table[LOCAL_BOUNDARIES]
        q, k, v, g, beta, a_log, dt_bias = self._inputs(q, k, v, g, beta, a_log, dt_bias, unit, part)
        opened = self.backend.forward_open(opts, q, k, v, g, beta, a_log, dt_bias, bounds)
        h0 = ops.gather(self._states(states, unit), table[PICK], 0)
        if docs.any_continues:
            h0 = mixed(h0, received[step[3]] if step[3] >= 0 else none, table[CONTINUES], table[ROW])
        out, ends, saved = self.backend.forward_close(opts, q, k, v, g, beta, a_log, dt_bias, h0, bounds, opened)
        return out, placed(ends, table[ENDING]), ops.gather(ends, table[LAST], 0), h0, saved

    def _run_forward(self, inputs, states, index):
        """``(results of the works, what later exchanges are tied to)``."""
        rank = self.group.rank
        none = ops.depend(ops.zeros(self._shape(inputs[0], inputs[2]), ms.float32), inputs[0])
        tied, received, done = none, (), ()
        for step in self.forward_schedule.steps:
            if step[0] == WORK:
                done = done + (self._forward_work(inputs, states, index, step, none, received),)
            else:
                payload = none if step[1] < 0 else done[step[2]][2] if step[2] >= 0 else received[step[3]]
                if self.point_to_point:
                    received = self._message(step, payload, rank + 1, rank - 1, received)
                else:
                    received, tied = self._round(step, payload, tied, rank - 1, received)
        return done, tied

    def forward(self, q, k, v, g, beta, a_log, dt_bias, initial_state, cu, output_final_state):
        """This rank's tokens in and out (BSND); ``(out, final_state, saved)``, saved = initial states and caches, work by work."""
        index = self._index(cu)
        heads, width, value_width = v.shape[2], q.shape[3], v.shape[3]
        if self.has_initial_state:
            states = transpose_state(initial_state, self.state_v_first)
        else:
            states = ops.zeros((self.first_document[self.num_rows], heads, width, value_width), ms.float32)
        inputs = (q, k, v, g, beta, a_log, dt_bias)
        done, tied = self._run_forward(inputs, states, index)
        places = self.forward_schedule.places
        out, final_state, saved = v * 1.0, ops.zeros(states.shape, ms.float32), ()
        if self.has_tokens:
            out = self._by_token(done, places, 0)
            final_state = self._by_document(done, places, 1)
            for unit in range(len(places)):
                for p in range(len(places[unit])):
                    saved = saved + (done[places[unit][p]][3],) + done[places[unit][p]][4]
        out = ops.depend(out, tied)
        if self.any_empty:
            final_state = final_state + states * self._empty(index)
        if output_final_state:
            final_state = self.group.collectives.all_reduce(ops.depend(final_state, out), FINAL_STATE)
            out = ops.depend(out, final_state)
        return out, transpose_state(final_state, self.state_v_first), saved

    # ---- results of all works, put together

    def _by_token(self, done, places, field):
        """``[B, T_local, H, ...]`` from the works' ``[1, T_part, H / G, ...]``."""
        rows = ()
        for b in range(self.num_rows):
            groups = ()
            for j in range(self.num_groups):
                parts = ()
                for p in range(self.num_parts[b]):
                    parts = parts + (done[places[b * self.num_groups + j][p]][field],)
                groups = groups + (_joined(parts, 1),)
            rows = rows + (_joined(groups, 2),)
        return _joined(rows, 0)

    def _by_document(self, done, places, field):
        """``[N, H, K, V]`` from the works' ``[N_row, H / G, K, V]``, summed over the parts."""
        rows = ()
        for b in range(self.num_rows):
            groups = ()
            for j in range(self.num_groups):
                total = done[places[b * self.num_groups + j][0]][field]
                for p in range(1, self.num_parts[b]):
                    total = total + done[places[b * self.num_groups + j][p]][field]
                groups = groups + (total,)
            rows = rows + (_joined(groups, 1),)
        return _joined(rows, 0)

    def _by_head(self, done, places, field):
        """``[H, ...]`` from the works' ``[H / G, ...]``, summed over rows and parts."""
        groups = ()
        for j in range(self.num_groups):
            total = done[places[j][0]][field]
            for b in range(self.num_rows):
                for p in range(0 if b > 0 else 1, self.num_parts[b]):
                    total = total + done[places[b * self.num_groups + j][p]][field]
            groups = groups + (total,)
        return _joined(groups, 0)

    def _empty(self, index):
        masks = ()
        for b in range(self.num_rows):
            masks = masks + (index[0][b][EMPTY],)
        return _joined(masks, 0)

    # ---- backward

    def _backward_work(self, inputs, grads, index, step, none, received, saved, d_out):
        """``(dq, dk, dv, dg, dbeta, da_log, ddt_bias, initial-state gradients by number, outgoing gradient)``; saved: of this work."""
        q, k, v, g, beta, a_log, dt_bias = inputs
        unit, part = step[1], step[2]
        docs, opts = self.parts[unit // self.num_groups][part], self.part_opts[unit // self.num_groups][part]
        table = index[1][unit // self.num_groups][part]
        bounds, h0 = table[LOCAL_BOUNDARIES], saved[0]
        q, k, v, g, beta, a_log, dt_bias = self._inputs(q, k, v, g, beta, a_log, dt_bias, unit, part)
        d_out = None if d_out is None else self._tokens(d_out, unit, part)
        caches, opened = self.backend.backward_open(opts, q, k, v, g, beta, a_log, dt_bias, h0, bounds, saved[1:], d_out)
        d_ends = ops.gather(self._states(grads, unit), table[PICK], 0)
        if docs.any_open:
            d_ends = mixed(d_ends, received[step[3]] if step[3] >= 0 else none, table[OPEN], table[ROW])
        results = self.backend.backward_close(opts, q, k, v, g, beta, a_log, dt_bias, h0, bounds, caches, opened, d_ends)
        d_starts = results[7]
        return results[:7] + (placed(d_starts, table[STARTING]), ops.gather(d_starts, table[FIRST], 0))

    def _run_backward(self, inputs, grads, index, saved, d_out):
        """``(results of the works, what later exchanges are tied to)``."""
        rank = self.group.rank
        per_work = len(saved) // self.backward_schedule.num_works if self.has_tokens else 0
        none = ops.depend(ops.zeros(self._shape(inputs[0], inputs[2]), ms.float32), grads)
        tied, received, done = none, (), ()
        for step in self.backward_schedule.steps:
            if step[0] == WORK:
                at = self.saving_order[step[1]][step[2]] * per_work
                mine = saved[at : at + per_work]
                done = done + (self._backward_work(inputs, grads, index, step, none, received, mine, d_out),)
            else:
                payload = none if step[1] < 0 else done[step[2]][8] if step[2] >= 0 else received[step[3]]
                if self.point_to_point:
                    received = self._message(step, payload, rank - 1, rank + 1, received)
                else:
                    received, tied = self._round(step, payload, tied, rank + 1, received)
        return done, tied

    def backward(self, q, k, v, g, beta, a_log, dt_bias, initial_state, cu, saved, d_out, d_final):
        """Gradients of this rank's tokens, partial (or reduced) parameter gradients, the whole initial-state gradient."""
        collectives = self.group.collectives
        index = self._index(cu)
        shape = (self.first_document[self.num_rows], v.shape[2], q.shape[3], v.shape[3])
        if d_final is not None:
            grads = transpose_state(collectives.all_reduce(d_final, FINAL_STATE), self.state_v_first)
        else:
            grads = ops.depend(ops.zeros(shape, ms.float32), q)
        inputs = (q, k, v, g, beta, a_log, dt_bias)
        done, tied = self._run_backward(inputs, grads, index, saved, d_out)
        places = self.backward_schedule.places
        if self.has_tokens:
            dq, dk, dv = self._by_token(done, places, 0), self._by_token(done, places, 1), self._by_token(done, places, 2)
            dg, dbeta = self._by_token(done, places, 3), self._by_token(done, places, 4)
            da_log = self._by_head(done, places, 5) if self.opts.has_a_log else a_log * 0.0
            ddt_bias = self._by_head(done, places, 6).reshape(dt_bias.shape) if self.opts.has_dt_bias else dt_bias * 0.0
            dh0 = self._by_document(done, places, 7)
        else:
            dq, dk, dv, dg, dbeta, da_log, ddt_bias = q * 0.0, k * 0.0, v * 0.0, g * 0.0, beta * 0.0, a_log * 0.0, dt_bias * 0.0
            dh0 = ops.zeros(shape, ms.float32)
        dq = ops.depend(dq, tied)
        da_log, ddt_bias, dq = reduce_gate_parameters(self.opts, da_log, ddt_bias, dq, collectives, self.reduced_by)
        if self.has_initial_state:
            if self.any_empty:
                dh0 = dh0 + grads * self._empty(index)
            dh0 = collectives.all_reduce(ops.depend(dh0, dq), INITIAL_STATE)
            dq = ops.depend(dq, dh0)
            dh0 = transpose_state(dh0, self.state_v_first)
        else:
            dh0 = initial_state - initial_state
        return dq, dk, dv, dg, dbeta, da_log, ddt_bias, dh0
