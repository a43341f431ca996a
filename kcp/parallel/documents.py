"""Packed documents under context parallelism: global boundaries -> what one rank holds (design section 4).

A document boundary is a zero of the transition, so one prefix and one suffix over all ranks serve every packing:

- forward: a rank's outgoing state is that of its last document, from the document's own initial state if it starts here; its transition M
  is zero unless the whole slice lies inside one document that started earlier and goes on; a rank without tokens is the identity;
- backward: a rank's outgoing gradient is that of its first document, from its own final-state gradient if it ends here; dM = M^T.

Rows are the B sequences of the batch, sliced alike; documents are numbered over all rows, N in all (a dense row is one document). The local
op sees L local documents. ``index(cu_seqlens)`` gives a tuple of tensors, named by the constants below; masks are ``[*, 1, 1, 1]`` float32.
"""

import mindspore as ms
import numpy as np
from mindspore import Tensor, ops

LOCAL_BOUNDARIES = 0  # [L + 1] int32, within the flattened slice
PICK = 1  # [L] number of each local document
ENDING = 2  # [N] local index of a document that ends here, L for the others
STARTING = 3  # [N] local index of a document that starts here, L for the others
CONTINUES = 4  # mask [L]: started on an earlier rank
OPEN = 5  # mask [L]: goes on on a later rank
ROW = 6  # [L] row of each local document
LAST, FIRST = 7, 8  # [B] local index of each row's last and first document
THROUGH = 9  # mask [B]: the slice lies inside one document that starts before it and ends after it
EMPTY = 10  # mask [N]: documents without tokens, on the rank that serves them; zeros elsewhere


def _mask(flags: np.ndarray) -> Tensor:
    return Tensor(flags.astype(np.float32).reshape(-1, 1, 1, 1))


@ms.jit_class
class HostDocuments:
    """Documents of the slice ``begin .. end`` of every row, from boundaries known as integers.

    Args:
        rows: global boundaries of every row, each from 0 to T.
        begin, end: this rank's slice.
        serves_empty: whether this rank serves documents without tokens.
    """

    def __init__(self, rows: tuple, begin: int, end: int, serves_empty: bool):
        documents = [(row, cu[n], cu[n + 1]) for row, cu in enumerate(rows) for n in range(len(cu) - 1)]
        row, start, stop = (np.array(column) for column in zip(*documents, strict=True))
        here = np.maximum(0, np.minimum(stop, end) - np.maximum(start, begin))
        local = np.flatnonzero(here)
        self.num_rows = len(rows)
        self.num_documents = len(documents)
        self.num_local = len(local)
        self.num_tokens = end - begin
        # one document in every row: the local op needs no boundaries
        self.dense = self.num_local == self.num_rows
        # nothing but one document: its local tables pick the whole
        self.single = self.num_local == self.num_documents == 1
        self.local_boundaries = None if self.dense else tuple(int(c) for c in np.concatenate([[0], np.cumsum(here[local])]))
        continues, is_open = start[local] < begin, stop[local] > end
        self.any_continues, self.any_open = bool(continues.any()), bool(is_open.any())
        owner = np.full(len(documents), self.num_local)
        ending, starting = owner.copy(), owner.copy()
        ending[local[~is_open]] = np.flatnonzero(~is_open)
        starting[local[~continues]] = np.flatnonzero(~continues)
        last, first, through = [], [], []
        for b in range(self.num_rows):
            mine = np.flatnonzero(row[local] == b)
            last.append(mine[-1] if len(mine) else 0)
            first.append(mine[0] if len(mine) else 0)
            through.append(len(mine) == 1 and bool(continues[mine[0]] and is_open[mine[0]]))
        self.any_through, self.all_through = any(through), all(through)
        empty = (start == stop) & serves_empty
        self.any_empty = bool(empty.any())
        boundaries = (0, 0) if self.dense else self.local_boundaries
        integers = (boundaries, local, ending, starting)
        self.tables = tuple(Tensor(np.asarray(x), ms.int32) for x in integers) + (_mask(continues), _mask(is_open))
        self.tables += tuple(Tensor(np.asarray(x), ms.int32) for x in (row[local], last, first))
        self.tables += (_mask(np.array(through)), _mask(empty))

    def index(self, cu_seqlens):
        return self.tables


@ms.jit_class
class TensorDocuments:
    """The same from boundaries ``[M + 1]`` or ``[B, M + 1]`` int32 whose values are unknown while a graph is compiled (L = N = B M)."""

    def __init__(self, num_rows: int, documents_per_row: int, begin: int, end: int, serves_empty: bool):
        self.num_rows = num_rows
        self.per_row = documents_per_row
        self.num_documents = self.num_local = num_rows * documents_per_row
        self.num_tokens = end - begin
        self.begin, self.end = begin, end
        self.serves_empty = 1.0 if serves_empty else 0.0
        self.dense = self.single = False
        self.any_continues = self.any_open = self.any_through = self.any_empty = True
        self.all_through = False
        numbers = np.arange(self.num_documents)
        self.numbers = Tensor(numbers, ms.int32)
        self.row = Tensor(numbers // documents_per_row, ms.int32)
        self.row_numbers = Tensor(numbers.reshape(num_rows, documents_per_row), ms.float32)
        self.row_begin = Tensor(np.arange(num_rows)[:, None] * self.num_tokens, ms.int32)
        self.all_tokens = Tensor([num_rows * self.num_tokens], ms.int32)

    def index(self, cu_seqlens):
        cu = cu_seqlens.reshape((self.num_rows, self.per_row + 1))
        start, stop = cu[:, :-1], cu[:, 1:]
        within = ops.minimum(ops.maximum(cu - self.begin, 0), self.num_tokens)
        holds = within[:, 1:] > within[:, :-1]
        boundaries = ops.concat(((within + self.row_begin)[:, :-1].reshape(-1), self.all_tokens), 0)
        continues = ops.logical_and(holds, start < self.begin)
        is_open = ops.logical_and(holds, stop > self.end)
        nowhere = self.numbers - self.numbers + self.num_local
        ends_here = ops.logical_and(holds, stop <= self.end).reshape(-1)
        starts_here = ops.logical_and(holds, start >= self.begin).reshape(-1)
        ending, starting = ops.select(ends_here, self.numbers, nowhere), ops.select(starts_here, self.numbers, nowhere)
        held = ops.cast(holds, ms.float32)
        last = ops.cast(ops.ReduceMax()(self.row_numbers * held, 1), ms.int32)
        first = ops.cast(ops.ReduceMin()(self.row_numbers * held + (1.0 - held) * self.num_local, 1), ms.int32)
        first = ops.minimum(first, self.num_local - 1)
        through = ops.ReduceMax()(ops.cast(ops.logical_and(continues, is_open), ms.float32), 1).reshape(-1, 1, 1, 1)
        empty = ops.cast(start == stop, ms.float32).reshape(-1, 1, 1, 1) * self.serves_empty
        masks = (ops.cast(continues, ms.float32).reshape(-1, 1, 1, 1), ops.cast(is_open, ms.float32).reshape(-1, 1, 1, 1))
        return (boundaries, self.numbers, ending, starting) + masks + (self.row, last, first, through, empty)


def mixed(own: Tensor, crossing: Tensor, mask: Tensor, row: Tensor) -> Tensor:
    """``[L, H, K, V]``: a document's own boundary value, or its row's crossing one ``[B, H, K, V]`` where ``mask`` is set."""
    return own * (1.0 - mask) + ops.gather(crossing, row, 0) * mask


def placed(local: Tensor, place: Tensor) -> Tensor:
    """``[L, H, K, V] -> [N, H, K, V]``: the local documents at their numbers, zeros for those whose place is L."""
    zero = ops.zeros((1,) + local.shape[1:], local.dtype)
    return ops.gather(ops.concat((local, zero), 0), place, 0)
