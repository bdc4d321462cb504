"""Fingerprints: a patch knows the tensor it was made for by a hash of a few of its elements, or of all."""

import hashlib
import json
import math
import re
from collections.abc import Iterator, Sequence

import numpy as np

from elementgrad._train.history import BitsAt, ReadBytes, first_bits
from elementgrad.errors import PatchError

SAMPLE = 64
"""The number of elements in a sample. Another training run changes nearly all, so a few tell two tensors apart."""
CHUNK = 1 << 18
"""The number of elements that are read at once for a full fingerprint."""


def fingerprint(
    shape: Sequence[int],
    dtype: str,
    read: ReadBytes,
    originals: BitsAt | None = None,
    full: bool = False,
) -> str:
    """Return a text that tells a tensor from others by shape, dtype and a sample of its elements, or by all.

    Where elements were changed, their `originals` count in place of what is there now. So the fingerprint is that of
    the original tensor, whichever patches are applied to it, and patches of disjoint elements fit in any order.

    >>> import numpy as np
    >>> from elementgrad._train.fingerprint import fingerprint
    >>> from elementgrad._train.history import BitsAt
    >>> w = np.arange(6, dtype=np.float32)
    >>> read = lambda positions: w[positions, None].view(np.uint8)
    >>> before, original = fingerprint((2, 3), "float32", read), BitsAt(np.array([4]), read(np.array([4])))
    >>> w[4] = 10.0
    >>> fingerprint((2, 3), "float32", read) == before
    False
    >>> fingerprint((2, 3), "float32", read, original) == before
    True
    """
    size = math.prod(shape)
    if originals is not None and len(originals.positions) != len(originals.bits):
        raise PatchError(
            f"positions of shape {originals.positions.shape} and bits of shape {originals.bits.shape}; give one row of "
            "bits per position"
        )
    ascending = first_bits([originals])
    digest = hashlib.sha256(json.dumps([list(map(int, shape)), dtype]).encode())
    for some in _chunks(size) if full else [_sample(size)]:
        if not some.size:
            continue
        content = np.array(read(some), np.uint8).reshape(some.size, -1)
        if ascending is not None:
            ascending.write_over(content, some)
        digest.update(content.tobytes())
    return f"{'full' if full else 'sample'}:{digest.hexdigest()}"


def fits(text: str, shape: Sequence[int], dtype: str, read: ReadBytes, originals: BitsAt | None = None) -> bool:
    """Return True if a fingerprint, sampled or full, is that of a tensor."""
    require_fingerprint(text)
    return text == fingerprint(shape, dtype, read, originals, full=text.startswith("full:"))


def require_fingerprint(text: str) -> None:
    """Raise a `PatchError` for a text that cannot be the fingerprint of any tensor."""
    if not re.fullmatch("(sample|full):[0-9a-f]{64}", text):
        raise PatchError(f"{text!r} is not a fingerprint, which is sample: or full: and 64 hexadecimal digits")


def sample_positions(shape: Sequence[int]) -> np.ndarray:
    """Return the positions of the elements that a sampled fingerprint is of, ascending."""
    return _sample(math.prod(shape))


def _sample(size: int) -> np.ndarray:
    """Return positions by a hash of 1, 2, 3, ... (splitmix64), which no version of a random generator can change."""
    if size <= SAMPLE:
        return np.arange(size)
    x = np.arange(1, SAMPLE + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.unique((x ^ (x >> np.uint64(31))) % np.uint64(size)).astype(np.int64)


def _chunks(size: int) -> Iterator[np.ndarray]:
    for start in range(0, size, CHUNK):
        yield np.arange(start, min(start + CHUNK, size))
