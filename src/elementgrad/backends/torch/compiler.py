"""What `torch.compile` must know of our functions, told once it is imported: importing it takes as long as PyTorch."""

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, TypeVar

import torch

COMPILER = "torch._dynamo"
Function = TypeVar("Function", bound=Callable[..., Any])
_waiting: list[Callable[[], object]] = []


def once_imported(tell: Callable[[], object]) -> None:
    """Call something as soon as the compiler is there, which may be now."""
    if COMPILER in sys.modules:
        tell()
        return
    if not any(isinstance(finder, _Watcher) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Watcher())
    _waiting.append(tell)


def in_graph(function: Function) -> Function:
    """Have the compiler keep a function as one step, instead of tracing through it."""
    once_imported(lambda: torch.compiler.allow_in_graph(function))
    return function


class _Watcher(MetaPathFinder):
    """Sees the compiler being imported, and then goes away; a look whether there is one changes nothing."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != COMPILER:
            return None
        sys.meta_path.remove(self)  # or else it would be asked again
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            sys.meta_path.insert(0, self)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                load(module)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                while _waiting:
                    _waiting.pop(0)()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
