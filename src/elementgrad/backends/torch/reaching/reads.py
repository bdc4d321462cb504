"""Values that leave PyTorch without an operation, as arrays, lists or addresses: nothing is known of what comes back.

Not by a mode of `__torch_function__`, which is off inside what it was asked about, a whole backward pass for one.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch

from elementgrad.backends.patch import Patch, Replace
from elementgrad.cleanup import assign, scope

Notice = Callable[[torch.Tensor, str], None]
WAYS = ("numpy", "tolist", "__array__", "__dlpack__", "data_ptr")
_local = threading.local()


def _install(replace: Replace) -> None:
    for name in WAYS:
        replace(torch.Tensor, name, _noticed(getattr(torch.Tensor, name), name))


def _noticed(original: Any, name: str) -> Any:
    @wraps(original)
    def read(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        for notice in getattr(_local, "notices", ()):
            notice(x, name)
        return original(x, *args, **kwargs)

    return read


_patch = Patch(_install)


@contextmanager
def noticing(notice: Notice) -> Iterator[None]:
    """In here, and in this thread, it is told what is read; it may raise."""
    with scope():
        assign(_local, "notices", (*getattr(_local, "notices", ()), notice))
        _patch.enter()
        yield
