"""How heads are divided among ranks and in time: what each strategy allows. Needs no MindSpore, so that runs are planned anywhere."""

GROUPS_PER_HOP = 8


def check_heads(size: int, **heads: int) -> None:
    """Refuse head counts that the group's size does not divide.

    Raises:
        ValueError: naming the count and what is allowed.
    """
    for name, count in heads.items():
        if count % size:
            raise ValueError(f"{name} is {count}; allowed under ulysses: a multiple of the group's size {size}")


def head_groups(num_heads: int, wanted: int | None, ranks: int = 2) -> int:
    """Number of head groups of a chain: as configured, else the largest divisor of the key heads up to 8 a hop.

    With G = 8 (W - 1) groups the pipeline's time, (G + W - 1) / G of the ideal, is 9/8 of it whatever W is; more groups would be smaller
    works and more messages for little.

    Raises:
        ValueError: the configured number does not divide the key heads.
    """
    if wanted is None:
        return max(n for n in range(1, GROUPS_PER_HOP * max(1, ranks - 1) + 1) if num_heads % n == 0)
    if num_heads % wanted:
        raise ValueError(f"ptp_head_groups is {wanted}; allowed: a divisor of num_heads={num_heads}")
    return wanted


def hybrid_degree(size: int, wanted: int | None, **heads: int) -> int:
    """Ulysses degree of a hybrid: as configured, else the largest that divides the group's size and every head count.

    Raises:
        ValueError: the configured degree does not divide one of them.
    """
    if wanted is None:
        return max(n for n in range(1, size + 1) if size % n == 0 and all(count % n == 0 for count in heads.values()))
    for name, count in (("the group's size", size), *heads.items()):
        if count % wanted:
            raise ValueError(f"hybrid_ulysses_degree is {wanted}; allowed: a divisor of {name} {count}")
    return wanted


def tree_rounds(position: int, size: int) -> tuple:
    """What the rank at ``position`` of a tree does: ``(sends to or -1, sends a state, receives from or -1, receives a state, goes on)`` a
    round.

    Ranks are named by position; a state is a summary that reaches back to position 0; ``goes on``: the rank's own summary, with what it
    received, is sent again.
    """
    out, distance = [], 1
    while distance < size:
        target, source = position + distance, position - distance
        out.append(
            (
                target if target < size else -1,
                position < distance,
                source if source >= 0 else -1,
                0 <= source < distance,
                position + 2 * distance < size,
            )
        )
        distance *= 2
    return tuple(out)
