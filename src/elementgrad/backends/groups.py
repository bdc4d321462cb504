"""Tensors that are worked on together: few enough to fit in memory, enough of them to be done soon."""

from collections.abc import Mapping


def grouped(sizes: Mapping[str, int]) -> list[list[str]]:
    """Neighbours together, up to the size of the largest, which must be held in any case.

    >>> from elementgrad.backends.groups import grouped
    >>> grouped({"embedding": 100, "weight": 60, "bias": 10, "head": 90})
    [['embedding'], ['weight', 'bias'], ['head']]
    """
    room = max(sizes.values())
    groups: list[list[str]] = [[]]
    for name, size in sizes.items():
        if sum(sizes[other] for other in groups[-1]) + size > room:
            groups.append([])
        groups[-1].append(name)
    return groups
