"""Parameters that are made on the way: they take the numbers of a tensor, and no function of PyTorch's is called."""

from functools import wraps
from typing import Any

import torch

from elementgrad.backends.patch import Patch, Replace
from elementgrad.backends.torch.functions import watchers, watching


def _install(replace: Replace) -> None:
    original = torch.Tensor._make_subclass

    @wraps(original)
    def make_subclass(kind: Any, data: Any, *args: Any, **kwargs: Any) -> Any:
        made = original(kind, data, *args, **kwargs)
        for watcher in watchers() if watching() else ():
            if hasattr(watcher, "remade"):
                watcher.remade(data, made)
        return made

    replace(torch.Tensor, "_make_subclass", staticmethod(make_subclass))


seen = Patch(_install)
"""While it is on, whoever watches is told of them."""
