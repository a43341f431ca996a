"""Units of a chain (one row and one group of heads): which tokens, heads and states are a unit's, and the works' results put together.

Shapes as in :mod:`kcp.parallel.ptp_chain`.
"""

import mindspore as ms
from mindspore import mint, ops

from kcp.parallel import chain
from kcp.parallel.documents import EMPTY, HostDocuments, TensorDocuments


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
class Units:
    """What :class:`~kcp.parallel.ptp_chain.PtpChain` knows of its units.

    Args:
        opts: options of the local op.
        rows: a :class:`RowParts`.
        num_groups: head groups, a divisor of the key heads.
    """

    def __init__(self, opts, rows, num_groups):
        self.opts = opts
        self.num_groups = num_groups
        self.num_rows = len(rows.whole)
        self.whole, self.parts = rows.whole, rows.parts
        self.num_parts = tuple(len(parts) for parts in rows.parts)
        counts = [documents.num_documents for documents in rows.whole]
        self.first_document = tuple(sum(counts[:b]) for b in range(self.num_rows + 1))
        self.first_token = tuple((0,) + ((parts[0].num_tokens,) if len(parts) > 1 else ()) for parts in rows.parts)

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

    def _range(self, heads, unit):
        """The unit's range of ``heads`` heads."""
        j, size = unit % self.num_groups, heads // self.num_groups
        return j * size, (j + 1) * size

    def _by_part(self, x):
        """``x[b][p]``: tokens of every part of every row, all heads, each in memory of its own; for the units in place."""
        if self.num_rows == 1 and self.num_parts[0] == 1:
            return ((x,),)
        return tuple(
            tuple(
                x[b : b + 1, begin : begin + part.num_tokens] * 1.0 for begin, part in zip(self.first_token[b], self.parts[b], strict=False)
            )
            for b in range(self.num_rows)
        )

    def _room_like(self, x):
        """``room[b][p]``: memory for a result shaped like ``x``, which the units fill."""
        return tuple(tuple(mint.empty((1, part.num_tokens) + x.shape[2:], dtype=x.dtype) for part in parts) for parts in self.parts)

    def _join_rooms(self, rooms):
        return _joined(tuple(_joined(parts, 1) for parts in rooms), 0)

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
