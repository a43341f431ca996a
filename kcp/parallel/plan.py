"""What a strategy costs: bytes, FLOPs, memory and time of one KDA layer on one rank, forward and backward; and which one ``auto`` takes.

The unit of work is one fused forward over the rank's share of the tokens; the constants were measured with the CPU kernels. The time is

    compute     work * forward FLOPs of T / W tokens / flops        work: units on the path that everybody waits for
    exchange    exchanges * latency + physical bytes / bandwidth     nothing is assumed to overlap

``scripts/bench_cp.py`` measures a machine's FLOP/s, latency and bandwidth and holds every strategy's time against this prediction.

Exchanges of states do not depend on T, Ulysses' do. Recomputing in the backward and work outside the core (projections, ShortConv) cost
every strategy the same and are left out. Needs no MindSpore.
"""

from dataclasses import dataclass, replace

from kcp.parallel.degrees import check_heads, head_groups, hybrid_degree, tree_rounds

FORWARD = 1.0
BACKWARD = 2.0
SUMMARY = 1.17  # [E | M]
END = 0.7  # E alone, from a known state
BACKWARD_END = 0.85  # dE alone

FLOAT32 = 4
DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
CANDIDATES = ("none", "ulysses", "state_scan", "ptp_chain", "ptp_tree", "hybrid")


@dataclass(frozen=True)
class Sizes:
    """One model's KDA layers under context parallelism.

    Attributes:
        ranks: W.
        batch, tokens: B rows of T tokens, all ranks together.
        num_heads, num_v_heads, head_dim, v_head_dim: Hk, Hv, K, V.
        layers: how many KDA layers.
        dtype: of the token tensors; states and summaries are float32.
        packed: document boundaries that a graph learns at run time (a Tensor): every rank then prepares for both, a boundary in its slice
            and none. Boundaries known as host integers never cost more than dense rows.
        chunk_size: C.
        disable_recompute: whether the forward's caches are kept.
        keep_transitions, ptp_head_groups, hybrid_ulysses_degree: as in :class:`~kcp.layers.kda_core.KdaCoreConfig`.
    """

    ranks: int
    batch: int
    tokens: int
    num_heads: int
    num_v_heads: int
    head_dim: int
    v_head_dim: int
    layers: int = 1
    dtype: str = "float32"
    packed: bool = False
    chunk_size: int = 64
    disable_recompute: bool = True
    keep_transitions: bool = True
    ptp_head_groups: int | None = None
    hybrid_ulysses_degree: int | None = None

    def __post_init__(self):
        for name in ("ranks", "batch", "tokens", "num_heads", "num_v_heads", "head_dim", "v_head_dim", "layers"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} is {value!r}; allowed: an integer >= 1")
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"dtype is {self.dtype!r}; allowed: {', '.join(DTYPE_BYTES)}")

    @property
    def local_tokens(self) -> float:
        """Tokens of all rows on one rank, B T / W."""
        return self.batch * self.tokens / self.ranks

    @property
    def state_bytes(self) -> int:
        """One float32 state of every row and head: B Hv K V 4."""
        return self.batch * self.num_v_heads * self.head_dim * self.v_head_dim * FLOAT32

    @property
    def transition_bytes(self) -> int:
        """One transition M of every row and head: B Hv K K 4."""
        return self.batch * self.num_v_heads * self.head_dim**2 * FLOAT32

    @property
    def forward_flops(self) -> float:
        """FLOPs of a rank's share of one forward, B T / W Hv (C (6 K + 4 V) + 6 K V): the textbook chunked form, whole triangles."""
        k, v = self.head_dim, self.v_head_dim
        return self.local_tokens * self.num_v_heads * (self.chunk_size * (6 * k + 4 * v) + 6 * k * v)


@dataclass(frozen=True)
class Machine:
    """What a rank runs on.

    Attributes:
        bandwidth: bytes a second that a rank receives.
        latency: seconds of one exchange of almost nothing.
        flops: FLOPs a second that the KDA kernels of one rank reach.
        has_all_to_all: False: served by an all-gather (the CPU).
        has_point_to_point: False: served by rounds of all-gathers (a graph).
        has_group_gather: False: an all-gather within a sub-group is a sum among zeros (the CPU).
        source: where the numbers come from, for people.
    """

    bandwidth: float
    latency: float
    flops: float
    has_all_to_all: bool = True
    has_point_to_point: bool = True
    has_group_gather: bool = True
    source: str = "given"

    def __post_init__(self):
        for name in ("bandwidth", "latency", "flops"):
            value = getattr(self, name)
            if not 0 <= value < float("inf") or (name != "latency" and value == 0):
                raise ValueError(f"{name} is {value!r}; allowed: a number > 0" + (" or 0" if name == "latency" else ""))


def machine_of(device: str, graph: bool) -> Machine:
    """Numbers for ``"CPU"`` (measured: loopback TCP, one core a rank) or another device (assumed, to be replaced by yours).

    Args:
        device: MindSpore's ``device_target``.
        graph: whether the model is compiled: no point to point then.
    """
    if device == "CPU":
        return Machine(3e8, 3.5e-4, 1e11, False, not graph, False, "measured on a CPU, one core a rank")
    return Machine(2.5e10, 3e-5, 3e13, has_point_to_point=not graph, source=f"assumed for {device}, not measured")


@dataclass(frozen=True)
class Cost:
    """One strategy's cost: one layer, one rank, forward and backward.

    Attributes:
        strategy: its name.
        refused: why it can't serve these sizes; None: it can.
        forward_bytes, backward_bytes: logical bytes received by the busiest rank of that direction.
        physical_bytes: what is moved for them, both ways, emulation included.
        exchanges: how often ranks wait for one another.
        work: in units of one forward over the rank's share.
        flops: of that work and of combining summaries.
        kept_bytes: memory held from forward to backward.
        seconds: predicted time of one layer.
    """

    strategy: str
    refused: str | None = None
    forward_bytes: int = 0
    backward_bytes: int = 0
    physical_bytes: int = 0
    exchanges: int = 0
    work: float = 0.0
    flops: float = 0.0
    kept_bytes: int = 0
    seconds: float = 0.0


def scan_work(blocks: int, packed: bool = False, keep_transitions: bool = True) -> float:
    """Units of a state scan over ``blocks`` ranks: the forward's summaries, the forward, the backward's, the backward.

    With two ranks the first one knows its state and makes E alone; the last forward and the first backward summary are not made.
    """
    if blocks == 1:
        return FORWARD + BACKWARD
    send = END if blocks == 2 and not packed else SUMMARY
    send_back = BACKWARD_END
    if not keep_transitions and (packed or blocks > 2):
        send_back += SUMMARY
    return send + FORWARD + send_back + BACKWARD


def chain_work(ranks: int, units: int) -> float:
    """Units of work that pass before the chain's last rank is done: ``(units + W - 1) / units`` of forward and backward."""
    return (FORWARD + BACKWARD) * (units + ranks - 1) / units


def halo_bytes(sizes: Sizes, kernel_size: int) -> int:
    """Bytes that ShortConv's halo receives per layer and direction, whatever the strategy: every other rank's tail of q, k and v."""
    width = 2 * sizes.num_heads * sizes.head_dim + sizes.num_v_heads * sizes.v_head_dim
    return (sizes.ranks - 1) * sizes.batch * (kernel_size - 1) * width * FLOAT32


def _input_bytes(s: Sizes) -> int:
    """q, k, v, g, beta of a rank's tokens."""
    numbers = 2 * s.num_heads * s.head_dim + s.num_v_heads * (s.v_head_dim + s.head_dim + 1)
    return int(s.local_tokens * numbers * DTYPE_BYTES[s.dtype])


def _kept(s: Sizes) -> int:
    """What every strategy keeps: the inputs, the incoming state, and the caches h, v_new, Aqk, Akk unless they are recomputed."""
    caches = 0.0
    if s.disable_recompute:
        caches = s.head_dim * s.v_head_dim / s.chunk_size + s.v_head_dim + 2 * s.chunk_size
    return _input_bytes(s) + int(s.local_tokens * s.num_v_heads * caches * FLOAT32)


def _heads_exchange(s: Sizes, m: Machine, degree: int) -> tuple[int, int, int]:
    """``(logical bytes one way, physical bytes both ways, exchanges)`` of Ulysses among ``degree`` ranks; both ways are equally large."""
    payload = _input_bytes(s) + int(s.local_tokens * s.num_v_heads * s.v_head_dim * DTYPE_BYTES[s.dtype])
    logical = payload * (degree - 1) // degree
    moved = logical
    if not m.has_all_to_all:
        moved = payload * (degree if degree < s.ranks and not m.has_group_gather else degree - 1)
    return logical, 2 * moved, 12


def _scan_exchange(s: Sizes, m: Machine, blocks: int, heads_share: int) -> tuple[int, int, int, int]:
    """``(forward bytes, backward bytes, physical bytes, exchanges)`` of the all-gathers of a state scan."""
    state, transition = s.state_bytes // heads_share, s.transition_bytes // heads_share
    back = state if s.keep_transitions else state + transition
    copies = blocks if heads_share > 1 and not m.has_group_gather else blocks - 1
    return (blocks - 1) * (state + transition), (blocks - 1) * back, copies * (state + transition + back), 2


def _combine_flops(s: Sizes, blocks: int, heads_share: int) -> float:
    """Prefix and suffix over the other ranks' summaries."""
    return 2 * (blocks - 1) * 2.0 * s.batch * s.num_v_heads / heads_share * s.head_dim**2 * s.v_head_dim


def _none(s: Sizes, m: Machine) -> Cost:
    if s.ranks > 1:
        raise ValueError("none is for one rank")
    return Cost("none", work=FORWARD + BACKWARD, kept_bytes=_kept(s))


def _ulysses(s: Sizes, m: Machine) -> Cost:
    check_heads(s.ranks, num_heads=s.num_heads, num_v_heads=s.num_v_heads)
    logical, physical, exchanges = _heads_exchange(s, m, s.ranks)
    return Cost("ulysses", None, logical, logical, physical, exchanges, FORWARD + BACKWARD, 0.0, _kept(s) + _input_bytes(s))


def _state_scan(s: Sizes, m: Machine) -> Cost:
    forward, backward, physical, exchanges = _scan_exchange(s, m, s.ranks, 1)
    kept = _kept(s) + s.state_bytes + s.ranks * s.transition_bytes * s.keep_transitions
    work = scan_work(s.ranks, s.packed, s.keep_transitions)
    return Cost("state_scan", None, forward, backward, physical, exchanges, work, _combine_flops(s, s.ranks, 1), kept)


def _ptp_chain(s: Sizes, m: Machine) -> Cost:
    units = s.batch * head_groups(s.num_heads, s.ptp_head_groups, s.ranks)
    rounds = units + s.ranks - 2
    physical = 2 * s.state_bytes
    if not m.has_point_to_point:
        physical = 2 * rounds * (s.ranks - 1) * (s.state_bytes // units)
    kept = _kept(s) + s.state_bytes
    return Cost("ptp_chain", None, s.state_bytes, s.state_bytes, physical, 2 * rounds, chain_work(s.ranks, units), 0.0, kept)


def _ptp_tree(s: Sizes, m: Machine) -> Cost:
    received, num_rounds = 0, len(tree_rounds(0, s.ranks))
    for position in range(s.ranks):
        steps = [r for r in tree_rounds(position, s.ranks) if r[2] >= 0]
        received = max(received, sum(s.state_bytes + (0 if r[3] else s.transition_bytes) for r in steps))
    physical = 2 * received
    if not m.has_point_to_point:
        physical = 2 * num_rounds * (s.ranks - 1) * (s.state_bytes + s.transition_bytes)
    products = 2 * num_rounds * 2 * 2.0 * s.batch * s.num_v_heads * s.head_dim**2 * (s.head_dim + s.v_head_dim)
    kept = _kept(s) + s.state_bytes + s.transition_bytes * s.keep_transitions
    work = scan_work(s.ranks, s.packed, s.keep_transitions)
    return Cost("ptp_tree", None, received, received, physical, 2 * num_rounds, work, products, kept)


def _hybrid(s: Sizes, m: Machine) -> Cost:
    degree = hybrid_degree(s.ranks, s.hybrid_ulysses_degree, num_heads=s.num_heads, num_v_heads=s.num_v_heads)
    if degree in (1, s.ranks):
        raise ValueError(f"its ulysses degree would be {degree}: that is {'state_scan' if degree == 1 else 'ulysses'}")
    blocks = s.ranks // degree
    heads, heads_physical, heads_exchanges = _heads_exchange(s, m, degree)
    forward, backward, physical, exchanges = _scan_exchange(s, m, blocks, degree)
    state, transitions = s.state_bytes // degree, blocks * s.transition_bytes // degree * s.keep_transitions
    work, products = scan_work(blocks, s.packed, s.keep_transitions), _combine_flops(s, blocks, degree)
    kept = _kept(s) + _input_bytes(s) + state + transitions
    moved, count = heads_physical + physical, heads_exchanges + exchanges
    return Cost("hybrid", None, heads + forward, heads + backward, moved, count, work, products, kept)


_COSTS = {
    "none": _none, "ulysses": _ulysses, "state_scan": _state_scan, "ptp_chain": _ptp_chain, "ptp_tree": _ptp_tree, "hybrid": _hybrid,
}  # fmt: skip


def estimate(strategy: str, sizes: Sizes, machine: Machine) -> Cost:
    """The cost of one strategy; ``refused`` says why where it can't serve the sizes.

    Raises:
        ValueError: there is no such strategy.
    """
    if strategy not in _COSTS:
        raise ValueError(f"strategy is {strategy!r}; allowed: {', '.join(CANDIDATES)}")
    if sizes.ranks == 1 and strategy != "none":
        return Cost(strategy, "one rank needs no strategy")
    try:
        cost = _COSTS[strategy](sizes, machine)
    except ValueError as error:
        return Cost(strategy, str(error))
    flops = cost.work * sizes.forward_flops + cost.flops
    exchange = cost.exchanges * machine.latency + cost.physical_bytes / machine.bandwidth
    return replace(cost, flops=flops, seconds=flops / machine.flops + exchange)


def compare(sizes: Sizes, machine: Machine) -> tuple[Cost, ...]:
    """The cost of every strategy, in the order of :data:`CANDIDATES`."""
    return tuple(estimate(strategy, sizes, machine) for strategy in CANDIDATES)


def choose(sizes: Sizes, machine: Machine) -> Cost:
    """What ``auto`` takes: the least predicted time among the strategies that serve the sizes; the first of equal ones."""
    return min((cost for cost in compare(sizes, machine) if cost.refused is None), key=lambda cost: cost.seconds)


def one_device_seconds(sizes: Sizes, machine: Machine) -> float:
    """Predicted time of the same layer on one device."""
    return (FORWARD + BACKWARD) * sizes.forward_flops * sizes.ranks / machine.flops
