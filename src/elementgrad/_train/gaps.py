"""Ascending positions as the gaps between them, in the narrowest unsigned integers that serve.

A gap is the number of positions that are left out before the next one. The largest integer of the width, M, is an
escape: it adds M to the gap and goes on with the next integer. At a density of one in a hundred this takes 1.09 bytes
for each position.
"""

from collections.abc import Iterator

import numpy as np

from elementgrad.errors import PatchError

WIDTHS = (1, 2, 4, 8)
CHUNK = 1 << 20
"""Positions that are handled at once, so that little memory is needed beside the arrays themselves."""


def encode_gaps(positions: np.ndarray) -> np.ndarray:
    """Return the gaps of ascending positions.

    >>> import numpy as np
    >>> encode_gaps(np.array([0, 1, 10, 1000]))
    array([  0,   0,   8, 255, 255, 255, 224], dtype=uint8)
    """
    lengths = [0] * len(WIDTHS)
    for gaps in _gaps(positions):
        for number, width in enumerate(WIDTHS):
            lengths[number] += len(gaps) + int((gaps // _escape(width)).sum())
    width, length = min(zip(WIDTHS, lengths, strict=True), key=lambda pair: pair[0] * pair[1])
    escape = _escape(width)
    codes = np.empty(length, f"<u{width}")
    start = 0
    for gaps in _gaps(positions):
        escapes = gaps // escape
        ends = start + np.cumsum(escapes + np.uint64(1)).astype(np.int64)
        codes[start : ends[-1]] = escape
        codes[ends - 1] = gaps % escape
        start = int(ends[-1])
    return codes


def decode_gaps(codes: np.ndarray, count: int, size: int) -> np.ndarray:
    """Return the `count` positions in a tensor of `size` elements that gaps stand for.

    >>> import numpy as np
    >>> decode_gaps(np.uint8([0, 0, 8, 255, 255, 255, 224]), count=4, size=1001)
    array([   0,    1,   10, 1000])
    """
    escape = _escape(codes.dtype.itemsize)
    chunks = [codes[start : start + CHUNK] for start in range(0, len(codes), CHUNK)]
    if sum(int(np.count_nonzero(chunk != escape)) for chunk in chunks) != count or (count and codes[-1] == escape):
        raise PatchError(f"the gaps are not those of {count} positions")
    positions = np.empty(count, np.int64)
    done, total = 0, np.uint64(0)
    for chunk in chunks:
        # A code above the size would make the sum wrap around; below it, the first sum above the size is seen.
        if chunk.max() > size:
            raise PatchError(f"the gaps lead beyond the {size} elements of the tensor")
        totals = np.cumsum(chunk, dtype=np.uint64) + total
        ends = np.flatnonzero(chunk != escape)
        reached = totals[ends] + np.arange(done, done + len(ends), dtype=np.uint64)
        if (totals > size).any() or (len(ends) and reached[-1] >= size):
            raise PatchError(f"the gaps lead beyond the {size} elements of the tensor")
        positions[done : done + len(ends)] = reached
        done, total = done + len(ends), totals[-1]
    positions.setflags(write=False)
    return positions


def _gaps(positions: np.ndarray) -> Iterator[np.ndarray]:
    for start in range(0, len(positions), CHUNK):
        before = positions[start - 1] if start else -1
        yield (np.diff(positions[start : start + CHUNK], prepend=before) - 1).astype(np.uint64)


def _escape(width: int) -> np.uint64:
    return np.uint64(2 ** (8 * width) - 1)
