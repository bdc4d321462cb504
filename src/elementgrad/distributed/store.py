"""A Jacobian on disk as a Zarr array, written block by block: a chunk that is there, and sound, is done.

Each chunk ends with a checksum of Zarr's crc32c codec. A call that goes on with an array reads the chunks that are
there once, removes those that do not decode, and computes them again with the missing ones.
"""

import os
import secrets
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from elementgrad.distributed.fingerprint import Fingerprint
from elementgrad.errors import OptionError, WorkerError, quoted
from elementgrad.extras import require
from elementgrad.plan.layout import Layout

KEY = "elementgrad"
"""Where in the attributes of an array it says which Jacobian it holds."""
MOST = 4
"""So many names of what differs are told."""
PATIENCE = 10.0
"""Seconds in which another process makes an array that it has begun to make."""


def checked(out: Any) -> Path:
    """A path at which an array can be made or gone on with, before anything is computed for it."""
    if not isinstance(out, (str, os.PathLike)) or not str(out) or "://" in str(out):
        raise OptionError(f'out={quoted(out)} is no path; give the name of a directory, such as "j.zarr"')
    require("zarr", "out=", "distributed")
    path = Path(os.path.abspath(out))
    if path.is_file():
        raise OptionError(f'{out} is a file; give the name of a directory, such as "j.zarr"')
    if not path.parent.is_dir():
        raise OptionError(f"{out}: there is no directory {path.parent}; make it first")
    left = [name for name in (os.listdir(path) if path.is_dir() else []) if not name.endswith(".partial")]
    if left and "zarr.json" not in left:
        raise OptionError(f"{out} is a directory that holds something else; give another name")
    return path


class Store:
    """The array, and which of its chunks are there. Zarr renames a chunk into place once it is written."""

    def __init__(self, path: Path, layout: Layout, array: Any):
        self.path = path
        self.array = array
        self._layout = layout

    @property
    def mark(self) -> str:
        """By what a worker knows that a path leads to this array, and to no other on a disk of its own."""
        return str(self.array.attrs[KEY]["mark"])

    @classmethod
    def at(cls, path: Path, layout: Layout, dtype: np.dtype, name: str, asked: Fingerprint) -> "Store":
        """The array of a Jacobian: a new one, or the one there if it is of the same Jacobian."""
        if not (path / "zarr.json").exists():
            told: Any = {"jacobian": name, "mark": secrets.token_hex(8), "complete": False}
            told |= asked.to_attributes()
            try:
                _make(path, layout, dtype, {KEY: told})
            except OSError as error:
                raise OptionError(f"{path} cannot be made: {error}; give another name") from error
        try:
            store = cls(path, layout, _opened(path))
            told = store.array.attrs[KEY]
        except (KeyError, OSError, ValueError):  # a group, or an array of somebody else's
            raise OptionError(f"{path} holds something else; give another name") from None
        differing = asked.differing(told)
        if differing is not None:
            what = f": what differs is {', '.join(differing[:MOST])}" if differing else ""
            raise OptionError(
                f"{path} holds {told['jacobian']} of another function, point, plan or budget; give another name, or "
                f"remove it{what}"
            )
        if (store.array.shape, store.array.chunks, store.array.dtype) != (layout.shape, layout.chunks, dtype):
            raise OptionError(f"{path} is damaged: its zarr.json describes another array; remove it")
        return store

    @classmethod
    def shared(cls, path: Path, layout: Layout, mark: str) -> "Store | None":
        """The same array in another process; None if that does not see it."""
        try:
            store = cls(path, layout, _opened(path))
            return store if store.mark == mark else None
        except (ImportError, KeyError, OSError, ValueError):
            return None

    def remove_damaged(self) -> None:
        """Remove the chunks that do not decode, so that they count as missing from now on."""
        damaged = [number for number in range(len(self._layout)) if not self._sound(number)]
        for number in damaged:
            self._chunk(number).unlink(missing_ok=True)
        if self.missing():  # a process that is killed before they are there again leaves an array that says so
            self._tell(complete=False)

    def missing(self) -> list[int]:
        """The blocks that are not there yet."""
        return [number for number in range(len(self._layout)) if not self._done(self._chunk(number))]

    def write(self, number: int, values: np.ndarray) -> None:
        """Put a block where it belongs."""
        try:
            self.array[self._layout.region(number)] = values.reshape(self._layout.sizes(number))
        except OSError as error:
            raise WorkerError(
                f"a block cannot be written to {self.path}: {error}; mend that, and the same call goes on"
            ) from error

    def finish(self) -> Any:
        """Say that all is there, if it is, clear away what killed processes left, and give the array to read."""
        import zarr

        missing = len(self.missing())
        if missing:
            raise WorkerError(
                f"{missing} blocks were written and are not in {self.path}; see whether somebody else clears it, and "
                "call again"
            )
        if not self.array.attrs[KEY]["complete"]:
            for left in self._partial():
                left.unlink(missing_ok=True)
            self._tell(complete=True)
        return zarr.open_array(str(self.path), mode="r")

    def _tell(self, complete: bool) -> None:
        told: Any = self.array.attrs[KEY]
        if told["complete"] != complete:
            self.array = self.array.update_attributes({KEY: dict(told) | {"complete": complete}})

    def _sound(self, number: int) -> bool:
        """Return whether a chunk decodes, or is not there at all."""
        if not self._done(self._chunk(number)):
            return True
        try:
            self.array[self._layout.region(number)]
        except OSError as error:
            raise OptionError(f"{self._chunk(number)} cannot be read: {error}; mend that, or remove it") from error
        except Exception:  # each codec raises what it likes
            return False
        return True

    @staticmethod
    def _done(chunk: Path) -> bool:
        """Whether a chunk is there; a machine that lost power may have left an empty one."""
        try:
            return chunk.stat().st_size > 0
        except FileNotFoundError:
            return False

    def _chunk(self, number: int) -> Path:
        return self.path / self.array.metadata.encode_chunk_key(self._layout.coordinates(number))

    def _partial(self) -> Iterator[Path]:
        return self.path.glob("c/**/*.partial")


def _make(path: Path, layout: Layout, dtype: np.dtype, attributes: dict[str, Any]) -> None:
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
    """Rename a file to a name that is free. Of several processes the one that makes a file beside it does so."""
    claim = target.with_name(f"{target.name}.partial")
    until = time.monotonic() + PATIENCE
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


def _opened(path: Path) -> Any:
    import zarr

    with zarr.config.set({"array.write_empty_chunks": True}):  # a chunk that is not there is not done
        return zarr.open_array(str(path), mode="r+")
