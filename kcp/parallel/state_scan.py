"""State scan: one all-gather of affine summaries, a prefix to this rank's incoming state, then the local op (section 6.3 of the seed).

    forward    local summary [E | M] -> all-gather -> prefix -> local forward from the incoming state
    backward   local dE -> all-gather -> suffix with dM = M^T kept from the forward -> local backward

What is exchanged does not depend on the number of tokens. A rank that knows its incoming state computes its outgoing one alone: the first
rank sends ``[E | 0]`` with E from the initial state, and in the backward the last rank sends dE from the final state's gradient. The last
rank's forward and the first rank's backward summary are never needed; those ranks send zeros without computing them.

Ranks run different graphs, and a graph orders its collectives by data alone: ``ops.depend`` ties each exchange to the one before it.
"""

import mindspore as ms
from mindspore import ops

from kcp.ops.layouts import transpose_state
from kcp.parallel import summary
from kcp.parallel.gradients import reduce_gate_parameters, share_final_state, share_initial_gradient


@ms.jit_class
class StateScan:
    """The strategy for KDA over dense slices, explicit forward and backward.

    ``opts`` is the local op's: it always has an initial state (K-first inside; the public states follow ``state_v_first``).
    """

    def __init__(self, opts, backend, group, reduced_by: str, has_initial_state: bool, keep_transitions: bool):
        self.opts = opts
        self.backend = backend
        self.group = group
        self.reduced_by = reduced_by
        self.has_initial_state = has_initial_state
        self.keep_transitions = keep_transitions
        self.is_first = group.rank == 0
        self.is_last = group.rank == group.size - 1

    def _state_shape(self, q, v):
        return q.shape[0], v.shape[2], q.shape[3], v.shape[3]

    def _own_summary(self, q, k, v, g, beta, a_log, dt_bias, initial_state, cu, opened):
        """``[N, Hv, K, V + K]`` that this rank sends in the forward."""
        batch, heads, width, value_width = self._state_shape(q, v)
        if self.is_last:
            return ops.zeros((batch, heads, width, value_width + width), ms.float32)
        if not self.is_first:
            return self.backend.forward_summary(self.opts, q, k, v, g, beta, a_log, dt_bias, cu, opened)
        if self.has_initial_state:
            state = transpose_state(initial_state, self.opts.state_v_first)
        else:
            state = ops.zeros((batch, heads, width, value_width), ms.float32)
        end = self.backend.forward_end(self.opts, q, k, v, g, beta, a_log, dt_bias, state, cu, opened)
        return ops.concat((end, ops.zeros((batch, heads, width, width), ms.float32)), -1)

    def forward(self, q, k, v, g, beta, a_log, dt_bias, initial_state, cu, output_final_state):
        """This rank's tokens in and out (BSND); ``(out, final_state, saved)``, saved = incoming state, transitions, local caches."""
        shape = self._state_shape(q, v)
        opened = self.backend.forward_open(self.opts, q, k, v, g, beta, a_log, dt_bias, cu)
        own = ops.depend(self._own_summary(q, k, v, g, beta, a_log, dt_bias, initial_state, cu, opened), q)
        gathered = self.group.collectives.all_gather(own)
        if self.is_first and self.has_initial_state:
            state = initial_state * 1.0
        else:
            state = summary.prefix(gathered, self.group.rank, ops.zeros(shape, ms.float32))
            state = transpose_state(state, self.opts.state_v_first)
        state = ops.depend(state, gathered)
        out, final_state, saved = self.backend.forward_close(self.opts, q, k, v, g, beta, a_log, dt_bias, state, cu, opened)
        if output_final_state:
            final_state = share_final_state(final_state, self.group.collectives)
            out = ops.depend(out, final_state)
        boundary = (state, gathered[..., shape[3] :]) if self.keep_transitions else (state,)
        return out, final_state, boundary + saved

    def _incoming_gradient(self, q, v, cu, saved, caches, opened, d_final):
        """Gradient ``[N, Hv, K, V]`` (K-first) of this rank's outgoing state; d_final K-first, the same on every rank."""
        batch, heads, width, value_width = self._state_shape(q, v)
        collectives = self.group.collectives
        none = ops.depend(ops.zeros((batch, heads, width, value_width + width), ms.float32), d_final)
        if self.keep_transitions:
            if self.is_first:
                own = none[..., :value_width]
            else:
                # without a known gradient at its end this is dE from zero
                own = self.backend.backward_end(self.opts, q, cu, caches, opened, d_final if self.is_last else none[..., :value_width])
            d_e, d_m = collectives.all_gather(own), ops.swapaxes(saved[1], -1, -2)
        else:
            if self.is_first:
                own = none
            elif self.is_last:
                own = self.backend.backward_end(self.opts, q, cu, caches, opened, d_final)
                own = ops.concat((own, none[..., value_width:]), -1)
            else:
                own = self.backend.backward_summary(self.opts, q, cu, caches, opened)
            gathered = collectives.all_gather(own)
            d_e, d_m = gathered[..., :value_width], gathered[..., value_width:]
        if self.is_last:
            return ops.depend(d_final, d_e)
        return summary.suffix(d_e, d_m, self.group.rank, none[..., :value_width])

    def backward(self, q, k, v, g, beta, a_log, dt_bias, initial_state, cu, saved, d_out, d_final):
        """Gradients of this rank's tokens, partial (or reduced) parameter gradients, the whole initial-state gradient."""
        kept = 2 if self.keep_transitions else 1
        state = saved[0]
        caches, opened = self.backend.backward_open(self.opts, q, k, v, g, beta, a_log, dt_bias, state, cu, saved[kept:], d_out)
        if d_final is not None:
            grad = transpose_state(self.group.collectives.all_reduce(d_final), self.opts.state_v_first)
        else:
            grad = ops.depend(ops.zeros(self._state_shape(q, v), ms.float32), q)
        grad = transpose_state(self._incoming_gradient(q, v, cu, saved, caches, opened, grad), self.opts.state_v_first)
        dq, dk, dv, dg, dbeta, da_log, ddt_bias, dh0 = self.backend.backward_close(
            self.opts, q, k, v, g, beta, a_log, dt_bias, state, cu, caches, opened, grad
        )
        da_log, ddt_bias, dq = reduce_gate_parameters(self.opts, da_log, ddt_bias, dq, self.group.collectives, self.reduced_by)
        if self.has_initial_state:
            dh0 = share_initial_gradient(ops.depend(dh0, dq), self.group.collectives)
            dq = ops.depend(dq, dh0)
        else:
            dh0 = initial_state - initial_state
        return dq, dk, dv, dg, dbeta, da_log, ddt_bias, dh0
