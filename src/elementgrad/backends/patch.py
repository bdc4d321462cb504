"""Attributes of classes and modules of a framework that are replaced while somebody needs it."""

import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

Replace = Callable[[Any, str, Any], None]
"""Puts something else in the place of an attribute: owner, name, the new."""
MISSING = object()


class Patch:
    """Attributes that are others from when the first needs it until the last does not, in whichever threads.

    What is put in their place must do as they did for threads that did not ask. What is installed may be for one of
    many things, such as a class: then each is counted by itself, and forgotten when nobody needs it.
    """

    def __init__(self, install: Callable[..., None]):
        self._install = install
        self._lock = threading.Lock()
        self._active: dict[tuple[Hashable, ...], _Active] = {}

    @contextmanager
    def on(self, *of: Hashable) -> Iterator[None]:
        """Have the attributes replaced; afterwards, also after an exception, they are as they were."""
        with self._lock:
            if of not in self._active:
                self._active[of] = self._installed(of)
            self._active[of].users += 1
        try:
            yield
        finally:
            with self._lock:
                self._active[of].users -= 1
                if not self._active[of].users:
                    self._active.pop(of).restore()

    def _installed(self, of: tuple[Hashable, ...]) -> "_Active":
        active = _Active()
        try:
            self._install(active.replace, *of)
        except BaseException:
            active.restore()
            raise
        return active


class _Active:
    """Attributes that are replaced now, as they stood in their owners: what was inherited stands in none."""

    def __init__(self) -> None:
        self.users = 0
        self._originals: list[tuple[Any, str, Any]] = []

    def replace(self, owner: Any, name: str, new: Any) -> None:
        original = vars(owner).get(name, MISSING)
        setattr(owner, name, new)
        self._originals.append((owner, name, original))

    def restore(self) -> None:
        while self._originals:
            owner, name, original = self._originals.pop()
            if original is MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, original)
