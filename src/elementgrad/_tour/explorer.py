"""The digits net of the tour and a digit, for `elementgrad explore`: `torch_net`, `torch_image`, `jax_net`, ..."""

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from elementgrad._tour.runner import FRAMEWORK_NAMES, Tour


@cache
def train_net(framework: str) -> dict[str, Any]:
    """Run the cell of the net, and return the names that it leaves."""
    with TemporaryDirectory() as folder:
        return Tour(framework, Path(folder)).run_shared("net").names


def __getattr__(name: str) -> Any:
    framework, _, what = name.partition("_")
    if framework not in FRAMEWORK_NAMES or what not in ("net", "image"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    names = train_net(framework)
    if what == "net" and framework == "jax":  # a function of its parameters, too
        return lambda image: names["net"](names["params"], image)
    return names[what]
