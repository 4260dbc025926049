"""Whose bytes a record holds that no directory names: no checksum covers the name, but records are written in an order.

`torch.save` writes the storages by the numbers of their keys, older versions by the keys as text, one right behind the other;
what `ckpt convert` writes keeps that. A name with a flipped bit does not fit between its neighbours.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Collection, Iterator, Sequence

from ckpt_tools.operations.repair.zip_walk import Found, follows


def misplaced(records: Sequence[Found], prefix: str, keys: Collection[str]) -> set[str]:
    """The names of whole storages that are not known for sure: they do not stand where the order has them.

    Args:
        records: of one archive, in file order. prefix: of the names of storages. keys: those that the pickle names.
    """
    names = [prefix + key for key in keys]
    found = Counter(record.name for record in records if record.proof)
    if all(found[name] == 1 for name in names):  # a damaged name would leave one of them without a record
        return set()
    orders = sorted(names, key=lambda name: (len(name), name)), sorted(names)
    return min((set(_misplaced(records, prefix, order)) for order in orders), key=len)


def _misplaced(records: Sequence[Found], prefix: str, order: Sequence[str]) -> Iterator[str]:
    """The same for one order of the names."""
    rank = {name: index for index, name in enumerate(order)}
    fitting: list[Found] = []
    for row in _rows(records):
        storages = [found for found in row if found.name.startswith(prefix)]
        ranks = [rank[found.name] - index if found.name in rank else None for index, found in enumerate(storages)]
        first = _first(ranks, begins=len(storages) < len(row) and not row[0].name.startswith(prefix))
        for found, at in zip(storages, ranks, strict=True):
            if at is not None and at == first:
                fitting.append(found)
            elif found.proof != "directory" and found.name in rank:
                yield found.name
    in_order = _longest([rank[found.name] for found in fitting])
    yield from (found.name for place, found in enumerate(fitting) if place not in in_order and found.proof != "directory")


def _rows(records: Sequence[Found]) -> Iterator[list[Found]]:
    """Records one right behind the other."""
    row: list[Found] = []
    for found in records:
        if row and not follows(found, row[-1]):
            yield row
            row = []
        row.append(found)
    if row:
        yield row


def _first(ranks: Sequence[int | None], *, begins: bool) -> int | None:
    """Which place in the order a row begins at, as most of its names say; None where that is not told.

    Behind the small records, which come before all storages, it `begins` with the first.
    """
    votes = Counter(rank for rank in ranks if rank is not None)
    if begins:
        votes[0] += 1
    most = votes.most_common(2)
    return most[0][0] if len(most) == 1 or (most and most[0][1] > most[1][1]) else None


def _longest(numbers: Sequence[int]) -> set[int]:
    """The places of the longest row of numbers that grow."""
    ends: list[int] = []
    places: list[int] = []
    before: list[int] = []
    for place, number in enumerate(numbers):
        at = bisect.bisect_left(ends, number)
        ends[at : at + 1] = [number]
        places[at : at + 1] = [place]
        before.append(places[at - 1] if at else -1)
    found: set[int] = set()
    place = places[-1] if places else -1
    while place >= 0:
        found.add(place)
        place = before[place]
    return found
