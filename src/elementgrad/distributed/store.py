"""A Jacobian on disk as a Zarr array, written block by block: a chunk that is there is done."""

import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from elementgrad.distributed.fingerprint import Fingerprint
from elementgrad.errors import OptionError, WorkerError
from elementgrad.extras import require
from elementgrad.plan.layout import Layout

KEY = "elementgrad"
"""Where in the attributes of an array it says which Jacobian it holds."""
MOST = 4
"""So many names of what differs are told."""


def checked(out: Any) -> Path:
    """A path at which an array can be made or gone on with, before anything is computed for it."""
    if not isinstance(out, (str, os.PathLike)) or not str(out) or "://" in str(out):
        raise OptionError(f'out={out!r} is no path; give the name of a directory, such as "j.zarr"')
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
            fill: Any = np.array(np.nan, dtype)[()]  # what is not there yet is no number
            options: Any = {"shape": layout.shape, "chunks": layout.chunks, "dtype": dtype, "fill_value": fill}
            try:
                _make(path, attributes={KEY: told}, **options)
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
        return store

    @classmethod
    def shared(cls, path: Path, layout: Layout, mark: str) -> "Store | None":
        """The same array in another process; None if that does not see it."""
        try:
            store = cls(path, layout, _opened(path))
            return store if store.mark == mark else None
        except (ImportError, KeyError, OSError, ValueError):
            return None

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
            self.array.update_attributes({KEY: dict(self.array.attrs[KEY]) | {"complete": True}})
        return zarr.open_array(str(self.path), mode="r")

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


def _make(path: Path, **options: Any) -> None:
    """An array without chunks. Of several calls at once one makes it: a file is linked to a name that is free."""
    import zarr

    path.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path, suffix=".partial") as beside:
        zarr.create_array(store=beside, **options)
        with suppress(FileExistsError):
            os.link(Path(beside, "zarr.json"), path / "zarr.json")


def _opened(path: Path) -> Any:
    import zarr

    with zarr.config.set({"array.write_empty_chunks": True}):  # a chunk that is not there is not done
        return zarr.open_array(str(path), mode="r+")
