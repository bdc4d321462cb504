"""Ref-counted monkey-patches of classes and modules of a framework."""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

from elementgrad._cleanup import MISSING, Lock, defer, restore_attribute, scope

Replace = Callable[[Any, str, Any], None]
"""Replaces an attribute: owner, name, new value."""


class AttributePatch:
    """Ref-counted monkey-patch: installed by the first user, removed by the last, thread-safe.

    `install(replace, *of)` replaces the attributes. The replacements must behave like the originals in threads that do
    not use the patch. With `of`, such as a class to patch, there is one patch for each `of`, counted by itself.
    """

    def __init__(self, install: Callable[..., None]):
        self._install = install
        self._lock = Lock()
        self._patches: dict[tuple[Hashable, ...], _InstalledPatch] = {}

    @contextmanager
    def on(self, *of: Hashable) -> Iterator[None]:
        """Replace the attributes for a block of code."""
        with scope():
            self.enter(*of)
            yield

    def enter(self, *of: Hashable) -> None:
        """Replace the attributes until the innermost open scope is left."""
        user = object()
        defer(self._leave, of, user)
        with self._lock.hold():
            patch = self._patches.setdefault(of, _InstalledPatch())
            patch.users.add(user)
            if not patch.installed:
                self._install(patch.replace, *of)
                patch.installed = True

    def _leave(self, of: tuple[Hashable, ...], user: object) -> None:
        with self._lock.hold():
            patch = self._patches.get(of)
            if patch is None or user not in patch.users:
                return
            if len(patch.users) == 1:
                patch.restore()
                del self._patches[of]
            patch.users.discard(user)


class _InstalledPatch:
    """The attributes that are replaced now. The original of an inherited one is `MISSING`: its owner has none."""

    def __init__(self) -> None:
        self.users: set[object] = set()
        self.installed = False
        self._originals: list[tuple[Any, str, Any]] = []

    def replace(self, owner: Any, name: str, new: Any) -> None:
        original = vars(owner).get(name, MISSING)
        self._originals.append((owner, name, original))
        setattr(owner, name, new)

    def restore(self) -> None:
        self.installed = False
        while self._originals:
            restore_attribute(*self._originals[-1])
            self._originals.pop()
