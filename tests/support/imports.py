"""Set frameworks up for tests when they are imported, so that no test imports them only for that.

`install` puts a finder in front of Python's. The finder imports PyTorch before TensorFlow where the tests of this
process use both, as the other order is known to crash, and changes the settings of a framework right behind its import.
"""

import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

SUPPORT = Path(__file__).parent
ROOT = SUPPORT.parent.parent
XLA_FLAGS = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
"""Fusion emitters take twice as long to compile a small program, and code in many parts a fifth longer."""


def set_up_torch(torch: ModuleType) -> None:
    torch.set_num_threads(1)


def set_up_jax(jax: ModuleType) -> None:
    jax.config.update("jax_enable_x64", True)
    # XLA ends the process for a flag that it does not know, so only versions that were tried are given these.
    if jax.__version_info__[:2] == (0, 10):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {XLA_FLAGS}".strip()
    jax.config.update("jax_compilation_cache_dir", str(ROOT / ".pytest_cache" / "jax"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)  # so no program is compiled by two workers
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    jax.config.update("jax_disable_most_optimizations", True)  # of the compiler: thousands of programs run once each


SET_UP: dict[str, Callable[[ModuleType], None]] = {"torch": set_up_torch, "jax": set_up_jax}


class FrameworkFinder(MetaPathFinder):
    """Finds frameworks as Python does, and does what has to come before and after their import."""

    def __init__(self, use_torch: bool):
        self._use_torch = use_torch

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name == "tensorflow" and self._use_torch:
            for earlier in ("torch", "triton"):
                if find_spec(earlier):
                    __import__(earlier)
        if name not in SET_UP:
            return None
        spec = PathFinder.find_spec(name)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_set_up(module: ModuleType) -> None:
                del spec.loader.exec_module
                run(module)
                SET_UP[name](module)

            spec.loader.exec_module = run_and_set_up
        return spec


def mentions_torch(files: Iterable[Path]) -> bool:
    """Tell whether tests, or the modules of `tests.support` that they import, may use PyTorch."""
    todo, seen = set(files), set()
    while todo:
        seen.add(path := todo.pop())
        text = path.read_text()
        if re.search(r"\btorch\b|\bfw\b|\bFRAMEWORKS\b", text):
            return True
        modules = re.findall(r"tests\.support\.(\w+)", text)
        for names in re.findall(r"from tests\.support import (.+)", text):
            modules += re.findall(r"\w+", names)
        todo |= {SUPPORT / f"{module}.py" for module in modules if (SUPPORT / f"{module}.py").exists()} - seen
    return False


def install(arguments: Iterable[str]) -> None:
    """Put the finder in place for the tests that pytest is given as `arguments`."""
    paths = [Path(argument.partition("::")[0]).absolute() for argument in arguments]
    files = [file for path in paths for file in (path.rglob("test_*.py") if path.is_dir() else [path])]
    sys.meta_path.insert(0, FrameworkFinder(mentions_torch(file for file in files if file.exists())))
