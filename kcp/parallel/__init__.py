"""Everything that crosses ranks: groups, collectives, strategies, summaries, halo, gradients, and the lockstep harness."""

from kcp.parallel.group import CpGroup
from kcp.parallel.halo import Halo
from kcp.parallel.state_scan import StateScan
from kcp.parallel.ulysses import ContextParallel, Ulysses

__all__ = ["ContextParallel", "CpGroup", "Halo", "StateScan", "Ulysses"]
