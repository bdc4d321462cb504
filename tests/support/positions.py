"""Positions at which cones are tested."""

from collections.abc import Iterator


def typical_positions(shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yield the first and last corner, the middle, and the middle of an edge."""
    yield tuple([0 for _ in shape])
    yield tuple([n - 1 for n in shape])
    yield tuple([n // 2 for n in shape])
    yield tuple([n // 2 if axis % 2 else 0 for axis, n in enumerate(shape)])
