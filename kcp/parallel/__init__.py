"""Everything that crosses ranks: groups, collectives, strategies, summaries, halo, gradients, and the lockstep harness."""

from kcp.parallel.group import CpGroup
from kcp.parallel.halo import Halo
from kcp.parallel.hybrid import Hybrid
from kcp.parallel.ptp_chain import PtpChain
from kcp.parallel.ptp_tree import PtpTree
from kcp.parallel.state_scan import StateScan
from kcp.parallel.traffic import Traffic
from kcp.parallel.ulysses import ContextParallel, Ulysses

__all__ = ["ContextParallel", "CpGroup", "Halo", "Hybrid", "PtpChain", "PtpTree", "StateScan", "Traffic", "Ulysses"]
