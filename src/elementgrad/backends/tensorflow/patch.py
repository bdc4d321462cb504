"""Attributes of TensorFlow's and Keras's classes that are replaced while somebody needs it."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Replace = Callable[[Any, str, Any], None]


class Patch:
    """Attributes that are others from when the first needs it until the last does not, in whichever threads.

    What is put in their place must do as they did for threads that did not ask.
    """

    def __init__(self, install: Callable[[Replace], None]):
        self._install = install
        self._lock = threading.Lock()
        self._users = 0
        self._originals: list[tuple[Any, str, Any]] = []

    @contextmanager
    def on(self) -> Iterator[None]:
        """Have the attributes replaced; afterwards, also after an exception, they are as they were."""
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._install(self._replace)
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if not self._users:
                    while self._originals:
                        setattr(*self._originals.pop())

    def _replace(self, owner: Any, name: str, new: Any) -> None:
        self._originals.append((owner, name, getattr(owner, name)))
        setattr(owner, name, new)
