"""A Jacobian on disk as a Zarr array, written block by block: a chunk that is there, and sound, is done.

Each chunk ends with a checksum of Zarr's crc32c codec. A call that resumes an array reads the chunks that are
there once, removes those that do not decode, and computes them again with the missing ones.

A later call knows by a `Fingerprint` that an array is of the same Jacobian: names, shapes, plan, arguments and the
parameters of a model are compared to the bit, and the function by its numbers. These are its value and sweeps from
seeded generic seeds through all of the Jacobian, compared in groups within a tolerance, since another machine, version
or number of threads sums in another order. Where all of these are the same, other bits are another function, unless
the same sweeps give other bits when they are run once more. A change of code, of a closure or of a global that changes
no number is no other function.
"""

import hashlib
import json
import os
import platform
import secrets
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from elementgrad._backends.autodiff import PRECISION
from elementgrad._backends.registry import backend_of
from elementgrad._names import pytree
from elementgrad._read.jacobian import Jacobian, to_numpy
from elementgrad._read.plan import BlockLayout
from elementgrad.errors import OptionError, WorkerError, quoted, require_packages

VERSION = 3
"""The version of what is compared: an array of another version is not resumed."""
TOLERANCE_POWER = 0.75
"""Numbers count as equal if they differ by less than this power of the precision."""
GROUPS = 256
"""Numbers are compared in this many groups, so that a change of a few among many is seen."""
PARTS_NAMED = 200
"""The most parts whose digests are stored one by one, to name the part that differs."""
ATTRIBUTE = "elementgrad"
"""The attribute of an array that says which Jacobian it holds."""
DIFFERENCES_NAMED = 4
"""The number of names of what differs in the error."""
MAX_WAIT = 10.0
"""Seconds in which another process makes an array that it has begun to make."""


@dataclass(frozen=True)
class Fingerprint:
    """The identity of a Jacobian: the arguments exactly, and the function by numbers that it leads to."""

    digest: str
    parts: Mapping[str, str]
    """The digests of its parts by their names, to tell which differs."""
    sketches: Sequence[Sequence[float]]
    """For the value and each probe: the largest number, and in units of it a weighted sum and a norm per group."""
    precision: float
    rounding: str
    """The machine, framework and threads that decide how sums round; empty if they do not."""
    bits: str
    """The digest of the value and of the probes."""
    is_repeatable: Callable[[], bool]
    """Runs the probes once more, and returns True if they have the same bits."""

    def to_attributes(self) -> dict[str, Any]:
        """Return it as the attributes of an array."""
        sketches = [list(sketch) for sketch in self.sketches]
        exact = {"rounding": self.rounding, "bits": self.bits}
        return {"question": self.digest, "parts": dict(self.parts), "sketch": sketches, **exact}

    def differences(self, attributes: Mapping[str, Any]) -> list[str] | None:
        """Return the names of what differs from the attributes of an array, as far as known; None if nothing does."""
        if attributes.get("question") != self.digest:
            theirs = attributes.get("parts", {})
            return sorted(name for name in {*self.parts, *theirs} if self.parts.get(name) != theirs.get(name))
        same = self._is_close(attributes["sketch"])
        if same and self.rounding and attributes.get("rounding") == self.rounding:
            same = attributes["bits"] == self.bits or not self.is_repeatable()
        return None if same else ["numbers that the function leads to"]

    def _is_close(self, sketches: Sequence[Sequence[float]]) -> bool:
        tolerance = self.precision**TOLERANCE_POWER
        return len(sketches) == len(self.sketches) and all(
            _are_close(mine, theirs, tolerance) for mine, theirs in zip(self.sketches, sketches, strict=True)
        )


def fingerprint(
    jacobian: Jacobian, layout: BlockLayout, probe: Callable[[], np.ndarray | None], probes: np.ndarray | None
) -> Fingerprint:
    """Return the fingerprint of a Jacobian that is cut into blocks.

    Args:
        jacobian: The Jacobian.
        layout: Its blocks.
        probe: Runs sweeps from generic seeds.
        probes: The numbers that it returned the first time; None where there is nothing to be swept.
    """
    backend, of, wrt = jacobian._backend, jacobian._of, jacobian._wrt
    described: dict[str, Any] = {
        "framework": backend.name,
        "of": of.name,
        "wrt": wrt.name,
        "dtype": backend.dtype(wrt.tensor),
        "shape": layout.shape,
        "blocks": [layout.chunks, layout.mode],
        "unconnected": jacobian._options.zero,
    }
    parts = {name: _digest(json.dumps(value).encode()) for name, value in described.items()}
    parts["elements"] = _digest(*[positions.tobytes() for positions in jacobian._positions()])
    parts |= {name: _digest(*content) for name, content in _given_values(jacobian)}
    whole = _digest(json.dumps([VERSION, parts]).encode())
    named = {name: digest[:12] for name, digest in list(parts.items())[:PARTS_NAMED]}
    values = [each for each in (to_numpy(jacobian.value, backend), probes) if each is not None]
    sketches = [list(_sketch(each)) for each in values]
    bits = _digest(*[np.ascontiguousarray(each).view(np.uint8).data for each in values])
    rounding = backend.load("read").rounding(wrt.tensor)
    rounding = rounding and f"{rounding}, {platform.node()}, {os.cpu_count()} processors"

    def is_repeatable() -> bool:
        again = None if probes is None else probe()
        return again is None or probes is None or again.tobytes() == probes.tobytes()

    precision = max(PRECISION[min(8, backend.itemsize(end.tensor))] for end in (of, wrt))
    return Fingerprint(whole, named, sketches, precision, rounding, bits, is_repeatable)


def _given_values(jacobian: Jacobian) -> Iterator[tuple[str, list[Any]]]:
    """Yield the tensors, numbers and strings among the arguments and what a model holds, by name and as bytes."""
    origin = jacobian._origin
    if origin is None:
        return
    arguments = {f"argument {i}": arg for i, arg in enumerate(origin.args)} | dict(sorted(origin.kwargs.items()))
    leaves = [leaf for name, value in arguments.items() for leaf in pytree.named_leaves(value, name)]
    leaves += [(f"{kind} {name}", tensor) for name, kind, tensor in origin.call.model.named_tensors()]
    for name, value in leaves:
        content = _to_bytes(value)
        if content is not None:
            yield name, content


def _to_bytes(value: Any) -> list[Any] | None:
    if type(value) in pytree.SIMPLE:
        return [repr(value).encode()]
    backend = backend_of(value)
    if backend is None and not isinstance(value, np.ndarray):
        return None
    dtype, shape = (value.dtype, value.shape) if backend is None else (backend.dtype(value), backend.shape(value))
    head = f"{dtype} {tuple(shape)}".encode()
    try:
        array = (
            value
            if backend is None
            else backend.to_numpy(value)
            if backend.kind(value) in "fc"
            else backend.read(value)
        )
    except Exception:  # a tensor without numbers, such as PyTorch's on its device "meta"
        array = None
    if array is None or array.dtype.hasobject:
        return [head]
    return [head, np.ascontiguousarray(array).reshape(-1).view(np.uint8).data]


def _digest(*contents: Any) -> str:
    digest = hashlib.sha256()
    for content in contents:
        digest.update(f"{len(content)}:".encode())
        digest.update(content)
    return digest.hexdigest()


def _sketch(values: np.ndarray) -> Iterator[float]:
    """Yield the largest number, and for each group, in units of it, a sum with generic weights and its norm."""
    flat = np.ascontiguousarray(values).reshape(-1)
    flat = flat.view(flat.real.dtype) if np.iscomplexobj(flat) else flat
    flat = np.nan_to_num(flat.astype(np.float64), nan=3.0, posinf=5.0, neginf=-5.0)
    largest = float(np.abs(flat).max(initial=0.0))
    yield largest
    random = np.random.default_rng(0)
    for group in np.array_split(flat, max(1, min(GROUPS, flat.size))):
        signs = np.where(random.random(group.size) < 0.5, -1.0, 1.0)
        weighted = random.uniform(0.5, 1.5, group.size) * signs * (group / (largest or 1.0))
        yield float(weighted.sum())
        yield float(np.linalg.norm(weighted))


def _are_close(mine: Sequence[float], theirs: Sequence[float], tolerance: float) -> bool:
    # Errors of single numbers add up as their norm does; each may be as large as one of the largest number.
    if len(mine) != len(theirs) or abs(mine[0] - theirs[0]) > tolerance * (mine[0] + theirs[0]):
        return False
    (sums, norms), (others, sizes) = (np.asarray(each[1:], np.float64).reshape(-1, 2).T for each in (mine, theirs))
    return bool((np.abs(sums - others) <= tolerance * (norms + sizes + 1)).all())


def check_out(out: Any) -> Path:
    """Return the path if an array can be made or resumed there; checked before anything is computed."""
    if not isinstance(out, (str, os.PathLike)) or not str(out) or "://" in str(out):
        raise OptionError(f'out={quoted(out)} is not a path; give the name of a directory, such as "j.zarr"')
    require_packages("zarr", "out=", "distributed")
    path = Path(os.path.abspath(out))
    if path.is_file():
        raise OptionError(f'{out} is a file; give the name of a directory, such as "j.zarr"')
    if not path.parent.is_dir():
        raise OptionError(f"{out}: there is no directory {path.parent}; make it first")
    entries = [name for name in (os.listdir(path) if path.is_dir() else []) if not name.endswith(".partial")]
    if entries and "zarr.json" not in entries:
        raise OptionError(f"{out} is a directory that holds something else; give another name")
    return path


class Store:
    """An array with some of its chunks. Zarr renames a chunk into place once it is written."""

    def __init__(self, path: Path, layout: BlockLayout, array: Any):
        self.path = path
        self.array = array
        self._layout = layout

    @property
    def mark(self) -> str:
        """The mark by which a worker knows that a path leads to this array, and to no other on a disk of its own."""
        return str(self.array.attrs[ATTRIBUTE]["mark"])

    @classmethod
    def at(cls, path: Path, layout: BlockLayout, dtype: np.dtype, name: str, wanted: Fingerprint) -> "Store":
        """Make the array of a Jacobian, or open the one there if it is of the same Jacobian."""
        if not (path / "zarr.json").exists():
            attributes: Any = {"jacobian": name, "mark": secrets.token_hex(8), "complete": False}
            attributes |= wanted.to_attributes()
            try:
                _make_array(path, layout, dtype, {ATTRIBUTE: attributes})
            except OSError as error:
                raise OptionError(f"{path} cannot be made: {error}; give another name") from error
        try:
            store = cls(path, layout, _open_array(path))
            attributes = store.array.attrs[ATTRIBUTE]
        except (KeyError, OSError, ValueError):  # a group, or an array of another program
            raise OptionError(f"{path} holds something else; give another name") from None
        differences = wanted.differences(attributes)
        if differences is not None:
            what = f": what differs is {', '.join(differences[:DIFFERENCES_NAMED])}" if differences else ""
            raise OptionError(
                f"{path} holds {attributes['jacobian']} of another function, point, plan or budget; give another name, "
                f"or remove it{what}"
            )
        if (store.array.shape, store.array.chunks, store.array.dtype) != (layout.shape, layout.chunks, dtype):
            raise OptionError(f"{path} is damaged: its zarr.json describes another array; remove it")
        return store

    @classmethod
    def open_shared(cls, path: Path, layout: BlockLayout, mark: str) -> "Store | None":
        """Open the same array in another process; return None if that does not see it."""
        try:
            store = cls(path, layout, _open_array(path))
            return store if store.mark == mark else None
        except (ImportError, KeyError, OSError, ValueError):
            return None

    def remove_damaged(self) -> None:
        """Remove the chunks that do not decode, so that they count as missing from now on."""
        damaged = [index for index in range(len(self._layout)) if not self._is_sound(index)]
        for index in damaged:
            self._chunk(index).unlink(missing_ok=True)
        if self.missing_blocks():  # a process that is killed before they are there again leaves an array that says so
            self._set_complete(False)

    def missing_blocks(self) -> list[int]:
        """Return the blocks that are not there yet."""
        return [index for index in range(len(self._layout)) if not _is_done(self._chunk(index))]

    def write(self, index: int, values: np.ndarray) -> None:
        """Write a block to its place."""
        try:
            self.array[self._layout.region(index)] = values.reshape(self._layout.sizes(index))
        except OSError as error:
            raise WorkerError(
                f"a block cannot be written to {self.path}: {error}; fix that, and the same call resumes"
            ) from error

    def finish(self) -> Any:
        """Mark the array as complete, clear away what killed processes left, and return it to be read."""
        import zarr

        missing = len(self.missing_blocks())
        if missing:
            raise WorkerError(
                f"{missing} blocks were written and are not in {self.path}; check that no other program deletes "
                "them, and call again"
            )
        if not self.array.attrs[ATTRIBUTE]["complete"]:
            for leftover in self.path.glob("c/**/*.partial"):
                leftover.unlink(missing_ok=True)
            self._set_complete(True)
        return zarr.open_array(str(self.path), mode="r")

    def _set_complete(self, complete: bool) -> None:
        attributes: Any = self.array.attrs[ATTRIBUTE]
        if attributes["complete"] != complete:
            self.array = self.array.update_attributes({ATTRIBUTE: dict(attributes) | {"complete": complete}})

    def _is_sound(self, index: int) -> bool:
        """Return True if a chunk decodes, or is not there at all."""
        if not _is_done(self._chunk(index)):
            return True
        try:
            self.array[self._layout.region(index)]
        except OSError as error:
            raise OptionError(f"{self._chunk(index)} cannot be read: {error}; mend that, or remove it") from error
        except Exception:  # each codec raises what it likes
            return False
        return True

    def _chunk(self, index: int) -> Path:
        return self.path / self.array.metadata.encode_chunk_key(self._layout.coordinates(index))


def _is_done(chunk: Path) -> bool:
    try:
        status = chunk.stat()
    except FileNotFoundError:
        return False
    except NotADirectoryError:
        raise OptionError(f"{chunk.parent} is in the way of a directory of the array; remove it") from None
    if not stat.S_ISREG(status.st_mode):
        raise OptionError(f"{chunk} is in the way of a block of the array; remove it")
    return status.st_size > 0  # a machine that lost power may have left an empty one


def _make_array(path: Path, layout: BlockLayout, dtype: np.dtype, attributes: dict[str, Any]) -> None:
    """Make an array without chunks, unless another call that begins at once is the one to make it."""
    import zarr
    from zarr.codecs import Crc32cCodec, ZstdCodec

    path.mkdir(exist_ok=True)
    fill: Any = np.array(np.nan, dtype)[()]  # what is not there yet is no number
    options: Any = {"shape": layout.shape, "chunks": layout.chunks, "dtype": dtype, "fill_value": fill}
    with tempfile.TemporaryDirectory(dir=path, suffix=".partial") as beside:
        codecs = [ZstdCodec(), Crc32cCodec()]  # the checksum last, so that nothing damaged is decompressed
        zarr.create_array(store=beside, compressors=codecs, attributes=attributes, **options)
        made, target = Path(beside, "zarr.json"), path / "zarr.json"
        with suppress(FileExistsError):
            try:
                os.link(made, target)  # only to a name that is free
            except FileExistsError:
                raise
            except (OSError, AttributeError):  # a disk or system without hard links
                _move(made, target)


def _move(made: Path, target: Path) -> None:
    """Rename a file to a free name. Of several processes, the one that creates a file beside it does so."""
    claim = target.with_name(f"{target.name}.partial")
    until = time.monotonic() + MAX_WAIT
    while not target.exists():
        try:
            claim.touch(exist_ok=False)
        except FileExistsError:
            if time.monotonic() > until:
                raise TimeoutError(f"a process that was to make it has left {claim.name} behind; remove it") from None
            time.sleep(0.01)
            continue
        try:
            if not target.exists():
                os.replace(made, target)
        finally:
            claim.unlink()


def _open_array(path: Path) -> Any:
    import zarr

    with zarr.config.set({"array.write_empty_chunks": True}):  # a chunk that is not there is not done
        return zarr.open_array(str(path), mode="r+")
