"""Attributes of classes and modules of a framework that are replaced while somebody needs it."""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

from elementgrad._cleanup import MISSING, Lock, defer, restore_attribute, scope

Replace = Callable[[Any, str, Any], None]
"""Puts something else in the place of an attribute: owner, name, the new."""


class AttributePatch:
    """Attributes that are others from when the first needs it until the last does not, in whichever threads.

    What is put in their place must do as they did for threads that did not ask. What is installed may be for one of
    many things, such as a class: then each is counted by itself, and forgotten when nobody needs it.
    """

    def __init__(self, install: Callable[..., None]):
        self._install = install
        self._lock = Lock()
        self._active: dict[tuple[Hashable, ...], _Active] = {}

    @contextmanager
    def on(self, *of: Hashable) -> Iterator[None]:
        """Have the attributes replaced; afterwards, also after an exception, they are as they were."""
        with scope():
            self.enter(*of)
            yield

    def enter(self, *of: Hashable) -> None:
        """Have the attributes replaced until the innermost open scope is left."""
        user = object()
        defer(self._leave, of, user)
        with self._lock.hold():
            active = self._active.setdefault(of, _Active())
            active.users.add(user)
            if not active.installed:
                self._install(active.replace, *of)
                active.installed = True

    def _leave(self, of: tuple[Hashable, ...], user: object) -> None:
        with self._lock.hold():
            active = self._active.get(of)
            if active is None or user not in active.users:
                return
            if len(active.users) == 1:
                active.restore()
                del self._active[of]
            active.users.discard(user)


class _Active:
    """Attributes that are replaced now, as they stood in their owners: what was inherited stands in none."""

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
