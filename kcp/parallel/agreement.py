"""What ranks must agree on before they compute together: exchanged once as a hash, refused on every rank with the values that differ."""

import hashlib
import json
import os
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, ops

import kcp
from kcp.parallel.collectives import Collectives, SingleRank
from kcp.parallel.group import CpGroup
from kcp.parallel.traffic import PARAMETER

_HASH_BYTES = 32
_SHORT = 100  # characters up to which two lists are shown whole
_MOST = 6  # differences in one message
_ABSENT = "nothing"

Exchange = Callable[[np.ndarray], np.ndarray]


class RankMismatchError(ValueError):
    """Ranks that work together differ in what they must share, or are not in the order of their slices."""


@dataclass(frozen=True)
class Report:
    """What one rank has to say.

    Attributes:
        rank: its place in the exchange.
        members: the ranks of its context-parallel group in slice order, a range of constant step.
        shared: values that all ranks of the exchange share.
        in_group: values that the group's members share.
        refusals: what this rank found wrong by itself.
    """

    rank: int
    members: tuple[int, ...]
    shared: Mapping[str, Any] = field(default_factory=dict)
    in_group: Mapping[str, Any] = field(default_factory=dict)
    refusals: Sequence[str] = ()


def versions() -> dict[str, str]:
    """Versions of what computes: kcp, MindSpore, MindFormers, NumPy and Python."""
    try:
        mindformers = version("mindformers")
    except PackageNotFoundError:
        mindformers = "not installed"
    found = {"kcp": kcp.__version__, "mindspore": ms.__version__, "mindformers": mindformers}
    return found | {"numpy": np.__version__, "python": platform.python_version()}


def describe_array(values: Any) -> str:
    """Dtype, shape, digest and first values of an array, Tensor or Parameter, in one line."""
    values = np.ascontiguousarray(values.asnumpy() if isinstance(values, Tensor) else values)
    digest = hashlib.sha256(values.tobytes()).hexdigest()[:16]
    first = " ".join(f"{value:.9g}" for value in values.reshape(-1)[:3].tolist())
    return f"{values.dtype} {list(values.shape)} that begins {first} (sha256 {digest})"


def check_agreement(
    group: CpGroup | None = None,
    *,
    shared: Mapping[str, Any] | None = None,
    parameters: Iterable[ms.Parameter] = (),
    in_group: Mapping[str, Any] | None = None,
    cu_seqlens: Any = None,
    local_tokens: int | None = None,
    num_tokens: int | None = None,
    slice_begin: int | None = None,
    refusals: Sequence[str] = (),
) -> None:
    """Refuse, on every rank alike, ranks that differ in what they must share. Call it once at start and before the first step.

    Collective over all processes of the launch: each of them must call it, whatever its group, with the same keywords. It costs one
    all-gather of 68 float32 numbers; the values themselves travel only when something differs. Versions are always compared.

    Args:
        group: this rank's context-parallel group; its rank, size and slice_lengths are checked. None: no group is checked.
        shared: values by name that all processes share (a configuration): plain dicts, lists and scalars.
        parameters: replicated parameters; every bit of their values counts.
        in_group: values by name that the group's members share.
        cu_seqlens: global document boundaries as :class:`~kcp.layers.KdaCore` takes them, shared by the group's members.
        local_tokens: tokens of a row that this rank holds.
        num_tokens: configured tokens of a whole row. With it an unsliced sequence is found, and boundaries in local positions.
        slice_begin: where this rank's slice begins in the whole row, as the caller cut it; needs local_tokens or num_tokens.
        refusals: what the caller found wrong on this rank; every rank then refuses.

    Raises:
        RankMismatchError: a ValueError of one line with what differs, the ranks and their values.
    """
    group_values = dict(in_group or {})
    exchange, rank, size = _exchange_of(group)
    own = [*refusals, *_launch_problems(rank, size)]
    members: tuple[int, ...] = (rank,)
    if group is not None:
        members = tuple(group.collectives.world_ranks) if isinstance(group.collectives, Collectives) else tuple(range(group.size))
        members = (rank,) if isinstance(group.collectives, SingleRank) else members
        own += _order_problems(group, members, rank)
        group_values |= {"group size": group.size, "slice_lengths": group.slice_lengths, "num_tokens": num_tokens}
        if cu_seqlens is not None:
            group_values["cu_seqlens"] = cu_seqlens = _plain(cu_seqlens)
        if group.slice_lengths is None:
            group_values["local_tokens"] = local_tokens
        own += _token_problems(group, local_tokens, num_tokens, slice_begin, cu_seqlens)
        members = members if rank in members else (rank,)
    everywhere = {"versions": versions()} | dict(shared or {})
    described = {parameter.name: describe_array(parameter) for parameter in parameters}
    if described:
        everywhere["parameters"] = described
    compare(Report(rank, members, _plain(everywhere), _plain(group_values), own), exchange)


def compare(own: Report, exchange: Exchange) -> None:
    """Exchange reports and refuse a difference.

    Args:
        own: this rank's report, of plain values.
        exchange: all-gather of a float32 vector: ``[n] -> [ranks, n]``.

    Raises:
        RankMismatchError: on every rank alike.
    """
    if _agree(exchange(_header(own))):
        return
    text = np.frombuffer(json.dumps(asdict(own)).encode(), np.uint8)
    longest = int(exchange(_bytes_as_numbers(np.array([text.size], np.int32).view(np.uint8))).astype(np.uint8).view(np.int32).max())
    padded = np.full(longest, ord(" "), np.uint8)
    padded[: text.size] = text
    reports = [Report(**json.loads(row.astype(np.uint8).tobytes())) for row in exchange(_bytes_as_numbers(padded))]
    found = disagreements([Report(r.rank, tuple(r.members), r.shared, r.in_group, r.refusals) for r in reports])
    more = f"; and {len(found) - _MOST} more" if len(found) > _MOST else ""
    raise RankMismatchError("ranks disagree: " + "; ".join(found[:_MOST]) + more)


def disagreements(reports: Sequence[Report]) -> list[str]:
    """What is wrong with the reports of all ranks, a phrase each: refusals, groups, then values by name."""
    found = [f"rank {report.rank}: {problem}" for report in reports for problem in report.refusals]
    found += _differences({report.rank: report.shared for report in reports}, "")
    by_rank = {report.rank: report for report in reports}
    for members in dict.fromkeys(report.members for report in reports):
        present = [by_rank[rank] for rank in members if rank in by_rank]
        found += _differences({report.rank: list(report.members) for report in present}, "group's ranks")
        found += _differences({report.rank: report.in_group for report in present}, "")
    return list(dict.fromkeys(found))


def _exchange_of(group: CpGroup | None) -> tuple[Exchange, int, int]:
    """How this process reaches the others: ``(exchange, its rank, number of ranks)``."""
    from mindspore.communication import GlobalComm, get_group_size, get_rank

    collectives = None if group is None else group.collectives
    if collectives is not None and not isinstance(collectives, (Collectives, SingleRank)):  # ranks in lockstep
        return lambda x: collectives.all_gather(Tensor(x), PARAMETER).asnumpy(), collectives.rank, collectives.size
    if not GlobalComm.INITED or get_group_size() == 1:
        return lambda x: x[None], 0, 1
    size = get_group_size()
    return lambda x: ops.AllGather()(Tensor(x)).asnumpy().reshape(size, -1), get_rank(), size


def _launch_problems(rank: int, size: int) -> list[str]:
    """What the launcher calls this process against what MindSpore made it; ranks in lockstep have neither."""
    from mindspore.communication import GlobalComm

    named = os.environ.get("RANK_ID")
    if not GlobalComm.INITED or size == 1 or named in (None, str(rank)):
        return []
    return [f"RANK_ID is {named}, its rank in the launch is {rank}; allowed: the same, rank order = slice order"]


def _order_problems(group: CpGroup, members: Sequence[int], rank: int) -> list[str]:
    if rank not in members or members[group.rank] != rank:
        place = members.index(rank) if rank in members else "none"
        return [f"CpGroup has rank {group.rank} of {group.size}, its place in the group is {place}; allowed: rank order = slice order"]
    return []


def _token_problems(
    group: CpGroup, local_tokens: int | None, num_tokens: int | None, slice_begin: int | None, cu_seqlens: Any
) -> list[str]:
    found, whole = [], num_tokens
    if local_tokens is not None:
        whole = sum(group.lengths(local_tokens)) if whole is None else whole
        mine = _slice_length(group, local_tokens, num_tokens)
        if mine != local_tokens:
            unsliced = ": the sequence is not sliced" if local_tokens == whole else ""
            found.append(f"{local_tokens} tokens of {whole}; allowed: {mine}, the slice of this rank{unsliced}")
    if group.slice_lengths is not None and num_tokens not in (None, sum(group.slice_lengths)):
        found.append(f"slice_lengths {group.slice_lengths} add up to {sum(group.slice_lengths)}; allowed: num_tokens={num_tokens}")
    elif slice_begin is not None and whole is not None and (group.slice_lengths is not None or whole % group.size == 0):
        begin, _ = group.slice_bounds(whole)
        if slice_begin != begin:
            found.append(f"its slice begins at {slice_begin}; allowed: {begin}, rank order = slice order")
    if cu_seqlens and whole is not None:
        rows = cu_seqlens if isinstance(cu_seqlens[0], list) else [cu_seqlens]
        wrong = next((row for row in rows if not row or row[-1] != whole), None)
        if wrong is not None:
            end = wrong[-1] if wrong else _ABSENT
            found.append(f"cu_seqlens ends at {end}; allowed: {whole}, boundaries are global positions of the whole sequence")
    return found


def _slice_length(group: CpGroup, local_tokens: int, num_tokens: int | None) -> int | float:
    if group.slice_lengths is not None:
        return group.slice_lengths[group.rank]
    if num_tokens is None:
        return local_tokens
    return num_tokens // group.size if num_tokens % group.size == 0 else num_tokens / group.size


def _plain(value: Any) -> Any:
    """The value as JSON would give it back."""
    if isinstance(value, Tensor):
        value = value.asnumpy()
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def _header(own: Report) -> np.ndarray:
    """``[4 + 64]``: whether this rank refuses, its group's first rank, step and size, and the two hashes."""
    step = own.members[1] - own.members[0] if len(own.members) > 1 else 1
    hashes = [hashlib.sha256(json.dumps(values, sort_keys=True).encode()).digest() for values in (own.shared, own.in_group)]
    numbers = np.frombuffer(b"".join(hashes), np.uint8)
    return np.concatenate([np.array([bool(own.refusals), own.members[0], step, len(own.members)], np.float32), _bytes_as_numbers(numbers)])


def _agree(headers: np.ndarray) -> bool:
    same_shared = (headers[:, 4 : 4 + _HASH_BYTES] == headers[0, 4 : 4 + _HASH_BYTES]).all()
    if headers[:, 0].any() or not same_shared:
        return False
    for header in headers:
        first, step, size = (int(number) for number in header[1:4])
        for rank in range(first, first + step * size, step):
            other = headers[rank] if rank < len(headers) else header
            if (other[1:4] != header[1:4]).any() or (other[-_HASH_BYTES:] != header[-_HASH_BYTES:]).any():
                return False
    return True


def _bytes_as_numbers(values: np.ndarray) -> np.ndarray:
    """Bytes as float32: exact, and a dtype that every device gathers."""
    return values.astype(np.float32)


def _differences(values: Mapping[int, Any], name: str) -> list[str]:
    """Phrases for the innermost places at which the ranks' values differ."""
    texts = {rank: json.dumps(value, sort_keys=True) for rank, value in values.items()}
    if len(set(texts.values())) <= 1:
        return []
    if all(isinstance(value, dict) for value in values.values()):
        keys = dict.fromkeys(key for value in values.values() for key in value)
        inner = ({rank: value.get(key, _ABSENT) for rank, value in values.items()} for key in keys)
        return [text for key, entry in zip(keys, inner, strict=True) for text in _differences(entry, f"{name}.{key}" if name else key)]
    if all(isinstance(value, list) for value in values.values()) and max(map(len, texts.values())) > _SHORT:
        length = max(map(len, values.values()))
        for index in range(length):
            entry = {rank: value[index] if index < len(value) else _ABSENT for rank, value in values.items()}
            if found := _differences(entry, f"{name}[{index}]"):
                return found[:1]
    ranks: dict[str, list[int]] = {}
    for rank, text in texts.items():
        ranks.setdefault(text if not isinstance(values[rank], str) else values[rank], []).append(rank)
    return [f"{name}: " + ", ".join(f"{_ranks(which)} {text}" for text, which in list(ranks.items())[:3])]


def _ranks(which: Sequence[int]) -> str:
    if len(which) == 1:
        return f"rank {which[0]} has"
    return "ranks " + ", ".join(map(str, which[:8])) + (", ... have" if len(which) > 8 else " have")
