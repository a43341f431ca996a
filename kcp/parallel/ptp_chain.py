"""PTP scan as a chain: every rank passes its outgoing state to the next one, in groups of heads, while the next group is computed.

    forward    rank 0: group 0, group 1, ...      rank 1: (state of group 0 arrives) group 0, group 1, ...
    backward   the same with state gradients, from the last rank to rank 0

No summary is made and nothing is computed twice: the arithmetic is that of one device, bit for bit where slices are cut at chunk borders. A
message is K V numbers a head; with G groups (times rows) and W ranks of equal slices the time is (G + W - 1) / G of the ideal. A state
crosses a border only inside a document: elsewhere nothing is sent and nobody waits (with boundaries in a Tensor all borders are crossed).
A rank without tokens passes on what it gets.

In graph mode there is no point to point: the messages go in G + W - 2 rounds of all ranks (``Collectives.round``), each tied to the one
before it. Rounds change what is moved, not what is computed.

Where the backend can, in PyNative, a unit reads its heads out of the whole inputs and writes its results into whole tensors (``in_place``);
else the inputs are sliced by heads and the results put together.

Shapes: states ``[*, H, K, V]`` are K-first here, float32; a unit is one row and one group of heads.
"""

from dataclasses import replace

import mindspore as ms
from mindspore import ops

from kcp.ops.layouts import transpose_state
from kcp.parallel import chain
from kcp.parallel.chain_units import Units
from kcp.parallel.documents import (
    CONTINUES,
    ENDING,
    FIRST,
    LAST,
    LOCAL_BOUNDARIES,
    OPEN,
    PICK,
    ROW,
    STARTING,
    mixed,
    placed,
)
from kcp.parallel.gradients import reduce_gate_parameters
from kcp.parallel.traffic import FINAL_STATE, INITIAL_STATE, STATE

WORK, RECV = chain.WORK, chain.RECV


@ms.jit_class
class PtpChain(Units):
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
        super().__init__(opts, rows, num_groups)
        self.backend = backend
        self.group = group
        self.reduced_by = reduced_by
        self.has_initial_state = has_initial_state
        self.state_v_first = state_v_first
        self.part_opts = tuple(
            tuple(replace(opts, cu_seqlens="tensor" if opts.cu_seqlens == "tensor" else part.local_boundaries) for part in parts)
            for parts in rows.parts
        )
        self.point_to_point = point_to_point
        self.in_place = point_to_point and hasattr(backend, "op_forward_into")
        self.has_tokens = self.num_parts[0] > 0
        self.any_empty = any(documents.any_empty for documents in rows.whole)
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
        unit, part = step[1], step[2]
        b = unit // self.num_groups
        docs, opts, table = self.parts[b][part], self.part_opts[b][part], index[1][b][part]
        bounds = table[LOCAL_BOUNDARIES]
        arrived = received[step[3]] if step[3] >= 0 else none
        if docs.single:
            h0 = arrived if docs.any_continues else self._states(states, unit)
        else:
            h0 = ops.gather(self._states(states, unit), table[PICK], 0)
            if docs.any_continues:
                h0 = mixed(h0, arrived, table[CONTINUES], table[ROW])
        if self.in_place:
            out = inputs[-1][b][part]
            tokens, heads = tuple(x[b][part] for x in inputs[:5]), self._range(out.shape[2], unit)
            ends, saved = self.backend.op_forward_into(out, opts, *tokens, *inputs[5:7], h0, bounds, heads)
        else:
            q, k, v, g, beta, a_log, dt_bias = inputs
            q, k, v, g, beta, a_log, dt_bias = self._inputs(q, k, v, g, beta, a_log, dt_bias, unit, part)
            opened = self.backend.forward_open(opts, q, k, v, g, beta, a_log, dt_bias, bounds)
            out, ends, saved = self.backend.forward_close(opts, q, k, v, g, beta, a_log, dt_bias, h0, bounds, opened)
        if docs.single:
            return out, none if docs.any_open else ends, ends, h0, saved
        return out, placed(ends, table[ENDING]), ops.gather(ends, table[LAST], 0), h0, saved

    def _run_forward(self, inputs, none, states, index):
        """``(results of the works, what later exchanges are tied to)``."""
        rank = self.group.rank
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
        none = ops.depend(ops.zeros(self._shape(q, v), ms.float32), q)
        places, room = self.forward_schedule.places, ()
        if self.in_place:
            room = self._room_like(v)
            inputs = tuple(self._by_part(x) for x in (q, k, v, g, beta)) + (a_log, dt_bias, room)
        else:
            inputs = (q, k, v, g, beta, a_log, dt_bias)
        done, tied = self._run_forward(inputs, none, states, index)
        final_state, saved = ops.zeros(states.shape, ms.float32), ()
        if self.has_tokens:
            if self.in_place:
                out = self._join_rooms(room)
            else:
                out = self._by_token(done, places, 0)
            if output_final_state:
                final_state = self._by_document(done, places, 1)
            for unit in range(len(places)):
                for p in range(len(places[unit])):
                    saved = saved + (done[places[unit][p]][3],) + done[places[unit][p]][4]
        else:
            out = v * 1.0
        out = ops.depend(out, tied)
        if self.any_empty and output_final_state:
            final_state = final_state + states * self._empty(index)
        if output_final_state:
            final_state = self.group.collectives.all_reduce(ops.depend(final_state, out), FINAL_STATE)
            out = ops.depend(out, final_state)
        return out, transpose_state(final_state, self.state_v_first), saved

    # ---- backward

    def _backward_work(self, inputs, grads, index, step, none, received, saved, d_out):
        """``(dq, dk, dv, dg, dbeta, da_log, ddt_bias, initial-state gradients by number, outgoing gradient)``; saved: of this work."""
        unit, part = step[1], step[2]
        b = unit // self.num_groups
        docs, opts, table = self.parts[b][part], self.part_opts[b][part], index[1][b][part]
        bounds, h0 = table[LOCAL_BOUNDARIES], saved[0]
        arrived = received[step[3]] if step[3] >= 0 else none
        if docs.single:
            d_ends = arrived if docs.any_open else self._states(grads, unit)
        else:
            d_ends = ops.gather(self._states(grads, unit), table[PICK], 0)
            if docs.any_open:
                d_ends = mixed(d_ends, arrived, table[OPEN], table[ROW])
        if self.in_place:
            room = tuple(x[b][part] for x in inputs[-1])
            tokens, heads = tuple(x[b][part] for x in inputs[:5]), self._range(room[2].shape[2], unit)
            parameters = self.backend.op_backward_into(
                room, opts, *tokens, *inputs[5:7], h0, bounds, saved[1:], d_out[b][part], d_ends, heads
            )
            results = room + parameters
        else:
            q, k, v, g, beta, a_log, dt_bias = inputs
            q, k, v, g, beta, a_log, dt_bias = self._inputs(q, k, v, g, beta, a_log, dt_bias, unit, part)
            d_out = None if d_out is None else self._tokens(d_out, unit, part)
            caches, opened = self.backend.backward_open(opts, q, k, v, g, beta, a_log, dt_bias, h0, bounds, saved[1:], d_out)
            results = self.backend.backward_close(opts, q, k, v, g, beta, a_log, dt_bias, h0, bounds, caches, opened, d_ends)
        d_starts = results[7]
        if docs.single:
            return results[:7] + (none if docs.any_continues else d_starts, d_starts)
        return results[:7] + (placed(d_starts, table[STARTING]), ops.gather(d_starts, table[FIRST], 0))

    def _run_backward(self, inputs, none, grads, index, saved, d_out):
        """``(results of the works, what later exchanges are tied to)``."""
        rank = self.group.rank
        per_work = len(saved) // self.backward_schedule.num_works if self.has_tokens else 0
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
        places, rooms = self.backward_schedule.places, ()
        if self.in_place:
            d_out = self._by_part(ops.zeros(v.shape, v.dtype) if d_out is None else d_out)
            rooms = tuple(self._room_like(x) for x in (q, k, v, g, beta))
            inputs = tuple(self._by_part(x) for x in (q, k, v, g, beta)) + (a_log, dt_bias, rooms)
        else:
            inputs = (q, k, v, g, beta, a_log, dt_bias)
        none = ops.depend(ops.zeros(self._shape(q, v), ms.float32), grads)
        done, tied = self._run_backward(inputs, none, grads, index, saved, d_out)
        if self.has_tokens:
            if self.in_place:
                dq, dk, dv, dg, dbeta = tuple(self._join_rooms(room) for room in rooms)
            else:
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
