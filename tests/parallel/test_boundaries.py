"""Document boundaries of every row of a batch: what is refused, and rows laid one after the other."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor

from kcp.parallel.boundaries import check_row_tensor, check_rows, flat_rows, flat_tensor_rows, host_rows

ROWS = ((0, 2, 7), (0, 0, 7), (0, 7, 7))
FLAT = [0, 2, 7, 7, 14, 21, 21]


def test_forms_of_boundaries():
    assert check_rows([0, 7], 1, 7) == check_rows([(0, 7)], 1, 7) == check_rows(np.array([0, 7]), 1, 7) == ((0, 7),)
    assert check_rows([list(row) for row in ROWS], 3, 7) == ROWS
    assert host_rows(Tensor(ROWS, ms.int32)) == ROWS
    assert host_rows(Tensor([0, 7], ms.int32)) == (0, 7)


def test_rows_one_after_the_other():
    assert flat_rows(ROWS, 7) == tuple(FLAT)
    flat = flat_tensor_rows(Tensor(ROWS, ms.int32), 7)
    assert flat.dtype == ms.int32 and flat.asnumpy().tolist() == FLAT


@pytest.mark.parametrize(("rows", "batch", "found"), [(ROWS, 2, 3), (ROWS[:1], 2, 1), ((0, 7), 2, 1), (ROWS[:2], 1, 2), ((), 2, 1)])
def test_boundaries_for_more_or_fewer_rows(rows, batch, found):
    with pytest.raises(ValueError, match=rf"cu_seqlens has boundaries for {found} rows; allowed: one list a row, {batch} in all"):
        check_rows(rows, batch, 7)


def test_a_wrong_row_is_named():
    with pytest.raises(ValueError, match=r"^cu_seqlens of row 1 .*6"):
        check_rows([(0, 7), (0, 6)], 2, 7)
    with pytest.raises(ValueError, match=r"^cu_seqlens (?!of row)"):
        check_rows([(0, 6)], 1, 7)
    with pytest.raises(TypeError, match="cu_seqlens has dtype Int64; allowed: Int32, or host integers"):
        host_rows(Tensor([0, 7], ms.int64))


@pytest.mark.parametrize(("shape", "batch", "documents"), [((2,), 1, 1), ((5,), 1, 4), ((1, 3), 1, 2), ((3, 2), 3, 1)])
def test_shapes_of_a_boundary_tensor(shape, batch, documents):
    assert check_row_tensor((shape, ms.int32), batch) == documents


@pytest.mark.parametrize(
    ("shape", "batch", "allowed"), [((1,), 1, "at least two"), ((2, 1), 2, "at least two"), ((5,), 2, r"\[B"), ((3, 4), 2, r"\[B=2")]
)
def test_wrong_shapes_of_a_boundary_tensor(shape, batch, allowed):
    with pytest.raises(ValueError, match=rf"^cu_seqlens has shape .*; allowed: {allowed}"):
        check_row_tensor((shape, ms.int32), batch)
