"""The chain computes what one device computes: the same bits, whatever the number of ranks, where slices are cut at chunk borders."""

import numpy as np
import pytest
from core_cases import TOKEN_INPUTS, CoreProblem, run_autodiff, run_explicit
from mindspore import Tensor

from kcp.ops import backends
from kcp.parallel import CpGroup, lockstep


class _OneContribution(CoreProblem):
    """The whole gradient of the final states comes from rank 0: a sum of thirds would be rounded."""

    def rank_tensors(self, rank):
        d_final = self.arrays()["d_final"]
        return {**super().rank_tensors(rank), "d_final": Tensor(d_final if rank == 0 else 0 * d_final)}


@pytest.mark.parametrize(
    ("lengths", "cu_seqlens"),
    [
        ((48, 40), None),
        ((16, 32, 0, 48, 7), None),
        ((16,) * 7 + (5,), None),
        ((16,) * 15 + (5,), None),
        pytest.param((16, 32, 0, 16) * 16, None, marks=pytest.mark.ci),
        ((16, 32, 40), ((0, 88), (0, 16, 88), (0, 48, 48, 88))),
        ((21, 16, 11), ((0, 5, 48), (0, 21, 48))),
    ],
    ids=["W2", "W5-empty-slice", "W8", "W16", "W64", "packed-W3", "packed-off-the-borders"],
)
@pytest.mark.parametrize(("backend", "chunk"), [pytest.param("composite", 16, marks=pytest.mark.ci), ("native", 16), ("native", 64)])
def test_same_bits_as_one_device(lengths, cu_seqlens, backend, chunk):
    """Chunks are a document's own: the last case cuts documents that begin at 5 and 21 at 21 and 37."""
    lengths = tuple(n * chunk // 16 for n in lengths)
    rows = None if cu_seqlens is None else tuple(tuple(c * chunk // 16 for c in row) for row in cu_seqlens)
    options = {"chunk_size": chunk}
    problem = _OneContribution(
        lengths=lengths, strategy="ptp_chain", batch=2 if rows is None else len(rows), cu_seqlens=rows, options=options
    )
    if backend not in backends.available():
        pytest.skip(f"the {backend} backend is not built here")
    with backends.use(backend):
        ranks = lockstep.run(len(lengths), lambda group: run_explicit(problem, group), lengths)
        whole = run_autodiff(problem.one_device(), CpGroup.single(), jit=False, host_boundaries=True)
    for name in ("out", *TOKEN_INPUTS):
        np.testing.assert_array_equal(np.concatenate([r[name] for r in ranks], 1), whole[name], err_msg=name)
    for r in ranks:
        np.testing.assert_array_equal(r["final_state"], whole["final_state"])
        np.testing.assert_array_equal(r["initial_state"], whole["initial_state"])
