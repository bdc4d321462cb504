"""A value that stands for its plain number in the user's code, and knows when it is looked at."""

from collections.abc import Callable
from typing import Any

import numpy as np
from jax._src import core

Array = Any
typeof: Callable[[Any], Any] = getattr(core, "typeof" if hasattr(core, "typeof") else "get_aval")
SLOT = "aval" in core.Tracer.__slots__
"""Whether tracers keep their type, or are asked for it."""


class Watched(core.Tracer):
    """A value that was computed from the source, with its number."""

    __slots__ = ("number", "value")

    def __init__(self, trace: Any, value: Array, number: int):
        super().__init__(*((trace, typeof(value)) if SLOT else (trace,)))
        self.value = value
        self.number = number

    if not SLOT:
        aval = property(lambda self: typeof(self.value))

    def to_concrete_value(self) -> Array:
        """The number itself."""
        return self.value

    def _left(self, word: str, decides: bool = False) -> Array:
        self._trace.leave(self, word, decides)
        return self.value

    def __bool__(self) -> bool:
        return bool(self._left("bool", decides=True))

    def __int__(self) -> int:
        return int(self._left("int"))

    def __index__(self) -> int:
        return int(self._left("int").__index__())

    def __float__(self) -> float:
        return float(self._left("float"))

    def __complex__(self) -> complex:
        return complex(self._left("complex"))

    def __array__(self, *args: Any, **kwargs: Any) -> np.ndarray:
        return np.asarray(self._left("numpy")).__array__(*args, **kwargs)

    def item(self, *args: Any) -> Any:
        """A plain number."""
        return self._left("item").item(*args)

    def tolist(self) -> Any:
        """Plain numbers."""
        return self._left("tolist").tolist()

    def __format__(self, spec: str) -> str:
        return format(self.value, spec)

    def __repr__(self) -> str:
        return repr(self.value)

    def block_until_ready(self) -> "Watched":
        """It is ready."""
        return self

    def devices(self) -> Any:
        """Where it lives."""
        return self.value.devices()

    @property
    def sharding(self) -> Any:
        """How it is spread out."""
        return self.value.sharding

    @property
    def device(self) -> Any:
        """Where it lives."""
        return self.value.device

    @property
    def committed(self) -> Any:
        """Whether it stays there."""
        return self.value.committed
