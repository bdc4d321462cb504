"""Checkpoints in a folder: shards, and an index that says which tensor is in which of them.

Patching a folder in place writes the changed shards under new names and syncs them, then replaces the index, and only
then removes the old shards. Until the index is replaced the folder is the old checkpoint, and from then on the new one,
whenever the process is killed. What a killed process leaves behind goes with the first change an hour later.
"""

import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

from elementgrad._files import STALE, remove_stale, replace_file, sync_directory
from elementgrad._place.grammar import listed
from elementgrad._train.weights import ENDINGS, FileTensor, Weights
from elementgrad.errors import OptionError, PatchError

INDEX = ".safetensors.index.json"
RENAMED = re.compile(r"(.*)\.[0-9a-f]{16}(\.safetensors)")
"""The name of a shard that replaced another one."""
UNFINISHED = re.compile(r"\.(.*)\.[0-9a-f]{16}\.tmp")
"""The name of a file that is being written."""


class Folder(Weights):
    """The tensors of a checkpoint in a folder, by name."""

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        self._index, self._map = self._read_index()
        self._shards = {shard: self._read_shard(shard) for shard in dict.fromkeys(self._map.values())}
        super().__init__({name: self._find(name) for name in self._map})

    def _read_index(self) -> tuple[Path | None, dict[str, str]]:
        """Return the index, and the shard of each tensor; a folder with a single file needs no index."""
        indices = sorted(self.path.glob(f"*{INDEX}"))
        if len(indices) > 1:
            raise PatchError(f"{self.path} has several indices: {listed([index.name for index in indices])}")
        if not indices:
            files = sorted(file.name for file in self.path.glob("*.safetensors"))
            if len(files) != 1:
                raise PatchError(
                    f"{self.path} holds {len(files)} .safetensors files and no {INDEX.removeprefix('.')}; give the "
                    "folder of one checkpoint"
                )
            return None, dict.fromkeys(Weights.read(self.path / files[0]).tensors, files[0])
        try:
            shards = json.loads(indices[0].read_bytes())["weight_map"]
            pairs = {str(name): str(shard) for name, shard in shards.items()}
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            raise PatchError(f"{indices[0]} is not an index of a checkpoint, which has a weight_map") from None
        for shard in dict.fromkeys(pairs.values()):
            if Path(shard).name != shard or not shard.endswith(".safetensors"):
                raise PatchError(f"{indices[0]} names {shard!r}, which is not a .safetensors file of the folder")
        return indices[0], pairs

    def _read_shard(self, shard: str) -> Weights:
        try:
            return Weights.read(self.path / shard)
        except FileNotFoundError:
            raise PatchError(f"{self._index} names {shard}, which is not there; copy it into the folder") from None

    def _find(self, name: str) -> FileTensor:
        shard = self._map[name]
        if name not in self._shards[shard].tensors:
            raise PatchError(f"{self._index} says that {name} is in {shard}, which does not have it")
        return self._shards[shard].tensors[name]

    def write_changed(
        self, names: Collection[str], out: str | os.PathLike[str] | None = None, link: bool = False
    ) -> None:
        """Write the shards of changed tensors: into a new folder with everything else, or else in place."""
        changed = dict.fromkeys(self._map[name] for name in names)
        if out is not None:
            self._copy(changed, Path(out), link)
        elif self._index is None:
            for shard in changed:
                self._require_own(self.path / shard)
                self._shards[shard].write(self.path / shard)
        elif changed:
            self._replace(self._index, changed)

    def _replace(self, index: Path, changed: Collection[str]) -> None:
        self._require_own(index)
        self._remove_superseded()
        renamed = {}
        for shard in changed:
            stem, ending = (RENAMED.fullmatch(shard) or re.fullmatch(r"(.*)(\.safetensors)", shard, re.DOTALL)).groups()  # type: ignore[union-attr]
            renamed[shard] = f"{stem}.{secrets.token_hex(8)}{ending}"
        try:
            for shard, name in renamed.items():
                self._shards[shard].write(self.path / name)
            content = json.loads(index.read_bytes())
            content["weight_map"] = {name: renamed.get(shard, shard) for name, shard in self._map.items()}
            replace_file(index, (json.dumps(content, indent=2) + "\n").encode())
        except BaseException:
            # An interrupt may have come after the index was replaced: what it names stays.
            with suppress(OSError, ValueError):
                names = set(json.loads(index.read_bytes())["weight_map"].values())
                for name in set(renamed.values()) - names:
                    (self.path / name).unlink(missing_ok=True)
            raise
        for shard in renamed:
            (self.path / shard).unlink(missing_ok=True)
        sync_directory(str(self.path))

    def _require_own(self, path: Path) -> None:
        if path.is_symlink():
            raise OptionError(
                f"{path} is a link, as in the cache of Hugging Face, whose files others share; write to another "
                "folder with out="
            )

    def _find_superseded(self) -> Iterator[Path]:
        """Yield shards that the index no longer names, and those written for an index that was never put in place."""
        named = set(self._map.values())
        stems = {RENAMED.sub(r"\1\2", shard) for shard in named}
        for path in self.path.iterdir():
            shard = UNFINISHED.sub(r"\1", path.name)
            if self._index is not None and shard not in named and RENAMED.sub(r"\1\2", shard) in stems:
                yield path

    def _remove_superseded(self) -> None:
        for path in self._find_superseded():
            with suppress(OSError):
                if time.time() - path.lstat().st_mtime > STALE:
                    path.unlink()

    def _copy(self, changed: Collection[str], out: Path, link: bool) -> None:
        target = Path(os.path.realpath(out))
        source = Path(os.path.realpath(self.path))
        if target == source or source in target.parents:
            raise OptionError(f"{out} is the folder itself or inside of it; give another one, or none to change it")
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise OptionError(f"{out} is there already; give a new folder")
        if not target.parent.is_dir():
            raise OptionError(f"{out}: there is no directory {out.parent}; make it first")
        remove_stale(str(target.parent), target.name)
        temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}.tmp")
        leave_out = {path.name for path in self._find_superseded()}
        try:
            temporary.mkdir()
            for path in sorted(source.iterdir()):
                copy = temporary / path.name
                if path.name in changed:
                    self._shards[path.name].write(copy)
                elif path.name in leave_out:
                    continue
                elif path.is_dir():
                    shutil.copytree(path, copy)
                elif link and path.name in self._shards:
                    os.link(os.path.realpath(path), copy)
                else:
                    shutil.copy2(path, copy)
                    with open(copy, "rb") as file:
                        os.fsync(file.fileno())
            sync_directory(str(temporary))
            os.replace(temporary, target)  # over a folder that is there and empty, too
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        sync_directory(str(target.parent))


def read_weights(path: str | os.PathLike[str]) -> Weights:
    """Open the weights in a file or folder.

    Raises:
        PatchError: They are of another kind, or damaged.
    """
    if os.path.isdir(path):
        return Folder(path)
    if not os.fspath(path).endswith(ENDINGS):
        raise PatchError(
            f"{path} is not a file of weights; give a .safetensors or .npz file, or a folder with shards and an index"
        )
    return Weights.read(path)


def write_weights(
    weights: Weights,
    path: str | os.PathLike[str],
    changed: Collection[str],
    out: str | os.PathLike[str] | None = None,
    link: bool = False,
) -> Path:
    """Write weights of which some tensors have changed to where they came from, or to another place; return it."""
    if isinstance(weights, Folder):
        weights.write_changed(changed, out, link)
    else:
        weights.write(path if out is None else out)
    return Path(path if out is None else out)
