"""Context-parallel groups smaller than the launch, and parts of a group."""

from kcp.parallel.group import CpGroup


def context_parallel_group(size: int) -> CpGroup:
    """The context-parallel group of this process: ``size`` consecutive ranks, the first starting at a multiple of size.

    Such groups share the batch of a launch among them.

    Args:
        size: Ranks that share a sample.

    Returns:
        The group; of one rank for size 1, the whole launch if it has ``size`` ranks.

    Raises:
        ValueError: The number of launched ranks is not a multiple of ``size``.
    """
    if size == 1:
        return CpGroup.single()
    world = CpGroup.world()
    if world.size % size:
        raise ValueError(
            f"context_parallel_size: {size} is not supported; the launch has {world.size} ranks, "
            "a multiple of context_parallel_size is needed"
        )
    begin = world.rank // size * size
    return part(world, range(begin, begin + size))


def part(group: CpGroup, ranks: range, slice_lengths: tuple | None = None) -> CpGroup:
    """The ranks ``ranks`` of ``group`` as a group of their own; this rank must be among them, and every one of them must ask for it.

    Args:
        group: the whole.
        ranks: the members, by their ranks in ``group``.
        slice_lengths: tokens of every member; None: equal.
    """
    if len(ranks) == 1:
        return CpGroup(0, 1, slice_lengths)
    collectives = group.collectives if len(ranks) == group.size else group.collectives.subgroup(ranks)
    return CpGroup(ranks.index(group.rank), len(ranks), slice_lengths, collectives=collectives)
