"""Everything that crosses ranks: groups, collectives, strategies, summaries, halo, gradients, plans, and the lockstep harness."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kcp.parallel.agreement import RankMismatchError, check_agreement
    from kcp.parallel.group import CpGroup
    from kcp.parallel.halo import Halo
    from kcp.parallel.hybrid import Hybrid
    from kcp.parallel.ptp_chain import PtpChain
    from kcp.parallel.ptp_tree import PtpTree
    from kcp.parallel.state_scan import StateScan
    from kcp.parallel.traffic import Traffic
    from kcp.parallel.ulysses import ContextParallel, Ulysses

__all__ = [
    "ContextParallel",
    "CpGroup",
    "Halo",
    "Hybrid",
    "PtpChain",
    "PtpTree",
    "RankMismatchError",
    "StateScan",
    "Traffic",
    "Ulysses",
    "check_agreement",
]

_HOMES = {
    "ContextParallel": "ulysses",
    "CpGroup": "group",
    "Halo": "halo",
    "Hybrid": "hybrid",
    "PtpChain": "ptp_chain",
    "PtpTree": "ptp_tree",
    "RankMismatchError": "agreement",
    "StateScan": "state_scan",
    "Traffic": "traffic",
    "Ulysses": "ulysses",
    "check_agreement": "agreement",
}


def __getattr__(name: str):
    """Load what was asked for: ``kcp.parallel.plan`` serves where MindSpore is not installed."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
