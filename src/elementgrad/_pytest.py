"""The pytest plugin: the fixture `gradients`, which tests that gradients flow and that they stay what they were.

pytest imports this module in every project in which elementgrad is installed, so it imports nothing else until a test
uses the fixture. A snapshot is a JSON file in the folder `gradients` beside the test file. It has each number twice:
in hexadecimal, which is exact, and as a decimal to read. Numbers are compared within bounds that come from the dtype:
another processor adds up in another order. A part of a tensor is compared within those of the whole, and a derivative
that is nothing but rounding within those of the value, as `eg.check` does.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import numpy as np

    from elementgrad._audit.result import Audit

FORMAT = 1
FOLDER = "gradients"
NAME = re.compile(r"[\w.\-]+")
SHOWN = 5
"""The number of differences that a failure shows."""
LARGEST = 10**8
"""The most numbers of a derivative by a whole tensor that is computed to learn its scale."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option of the plugin."""
    group = parser.getgroup("elementgrad", "gradients")
    group.addoption(
        "--update-gradients", action="store_true", help="write what gradients.snapshot compares, instead of comparing"
    )


@pytest.fixture
def gradients(request: pytest.FixtureRequest) -> "Gradients":
    """Test gradients: `gradients.flow(model, loss)` and `gradients.snapshot(name, f, *args, of=..., wrt=...)`."""
    written = request.config.stash.setdefault(_WRITTEN, {})
    return Gradients(request.path, bool(request.config.getoption("--update-gradients")), written)


_WRITTEN: pytest.StashKey[dict[Path, str]] = pytest.StashKey()


@dataclass(frozen=True)
class Gradients:
    """The fixture `gradients` of one test."""

    _test: Path
    _update: bool
    _written: dict[Path, str] = field(default_factory=dict)

    def flow(self, model: Any, loss: Callable[..., Any], except_: str | Iterable[str] = ()) -> "Audit":
        """Fail with the table of `eg.audit` if a parameter of a model does not learn.

        Args:
            model: The model, as for `eg.audit`.
            loss: Its loss, or a training step.
            except_: Names and patterns of parameters and modules that need not learn.

        Returns:
            The audit, for what else is to be tested about it.
        """
        __tracebackhide__ = True
        import elementgrad as eg

        audit = eg.audit(model, loss, except_)
        if not audit.ok:
            pytest.fail(str(audit), pytrace=False)
        return audit

    def snapshot(
        self,
        name: str,
        f: Callable[..., Any],
        *args: Any,
        of: Any = None,
        wrt: Any = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Fail if a derivative is no longer what it was when `--update-gradients` wrote it to a file.

        Args:
            name: The name of the snapshot, which is part of the name of the file.
            f: A function or model, as for `eg.jacobian`.
            *args: Its arguments.
            of: What is differentiated; it may be several places.
            wrt: What it is differentiated by; likewise.
            kwargs: Keyword arguments of `f`.

        Returns:
            The derivative, or the structure of them that was asked for.
        """
        __tracebackhide__ = True
        if not isinstance(name, str) or not NAME.fullmatch(name):
            pytest.fail(
                f"snapshot name {name!r}: it becomes a file name; use letters, digits, '.', '-' and '_'", pytrace=False
            )
        values, derivative = _derive(f, args, dict(kwargs or {}), of, wrt)
        path = self._test.parent / FOLDER / f"{self._test.stem}.{name}.json"
        text = _to_json(values)
        if self._written.setdefault(path, text) != text:
            pytest.fail(f"two snapshots of {path.name} differ in one run; give each a name of its own", pytrace=False)
        if self._update:
            _write(path, text)
            return derivative
        problem = _compare(path, values, cache(lambda: _scales(f, args, dict(kwargs or {}), of, wrt)))
        if problem is not None:
            pytest.fail(problem, pytrace=False)
        return derivative


@dataclass(frozen=True)
class _Derivative:
    """One derivative in a snapshot."""

    dtype: str
    """The coarser dtype of both sides."""
    array: "np.ndarray"


def _derive(
    f: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], of: Any, wrt: Any
) -> tuple[dict[str, _Derivative], Any]:
    import elementgrad as eg
    from elementgrad._names import pytree

    jacobians = eg.jacobian(f, *args, kwargs=kwargs, of=of, wrt=wrt)
    dense = pytree.map_tree(jacobians, lambda jacobian: jacobian.dense())
    pairs = zip(pytree.named_leaves(jacobians, "d"), pytree.leaves_of(dense), strict=True)
    return {name: _read(jacobian, tensor) for (name, jacobian), tensor in pairs}, dense


def _scales(
    f: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], of: Any, wrt: Any
) -> dict[str, float]:
    """Return the sizes relative to which derivatives are rounded, by their names.

    That is the largest number of the derivative by the whole tensor. Where this is rounding alone, as by the biases of
    keys in attention, it is the value.
    """
    import numpy as np

    import elementgrad as eg
    from elementgrad._names import pytree
    from elementgrad._place.place import Place, parse_place

    def widen(place: Any) -> Place:
        part = parse_place(place)
        return Place(part.tensor, part.name, (), part.kind)

    whole = None if wrt is None else pytree.map_tree(wrt, widen)
    jacobians = eg.jacobian(f, *args, kwargs=kwargs, of=of, wrt=whole)
    named = pytree.named_leaves(jacobians, "d")
    try:
        verdicts = _find_verdicts(eg.explain(f, *args, kwargs=kwargs, of=of, wrt=whole))
    except eg.ElementgradError:  # a side is complex
        verdicts = [""] * len(named)

    def size(jacobian: Any, x: Any) -> float:
        array = _read(jacobian, x).array
        return float(np.max(np.abs(array[np.isfinite(array)]), initial=0.0))

    return {
        name: max(1.0, size(jacobian, jacobian.value))
        if verdict == "zero"
        else size(jacobian, jacobian.dense())
        if math.prod(jacobian.shape) <= LARGEST
        else 0.0
        for (name, jacobian), verdict in zip(named, verdicts, strict=True)
    }


def _find_verdicts(diagnoses: Any) -> list[str]:
    if hasattr(diagnoses, "verdict"):
        return [diagnoses.verdict]
    branches = diagnoses.values() if isinstance(diagnoses, Mapping) else diagnoses
    return [verdict for branch in branches for verdict in _find_verdicts(branch)]


def _read(jacobian: Any, tensor: Any) -> _Derivative:
    from elementgrad._backends import registry
    from elementgrad._explain.differences import EPSILON

    backend = registry.require_backend(tensor)
    names = [backend.dtype(x) for x in (tensor, jacobian.value)]
    dtype = max([name for name in names if name in EPSILON], key=EPSILON.__getitem__, default="float32")
    array = backend.to_float64(tensor) if backend.kind(tensor) == "f" else backend.read(tensor)
    if array is None:
        raise TypeError("the derivative has no numbers to keep, as it is traced; call snapshot outside of a compiler")
    return _Derivative(dtype, array)


def _to_json(values: Mapping[str, _Derivative]) -> str:
    import json

    derivatives = {
        name: {
            "dtype": each.dtype,
            "shape": list(each.array.shape),
            "hex": [float(number).hex() for number in _parts(each.array)],
            "decimal": [float(f"{x:.6g}") if math.isfinite(x) else str(x) for x in _parts(each.array)],
        }
        for name, each in values.items()
    }
    return json.dumps({"format": FORMAT, "derivatives": derivatives}, indent=1) + "\n"


def _from_json(text: bytes) -> "dict[str, _Derivative] | None":
    """Return the derivatives in the content of a file; None if it is no snapshot."""
    import json

    try:
        content = json.loads(text)
        known = content["format"] == FORMAT
        return {name: _parse(each) for name, each in content["derivatives"].items()} if known else None
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError):
        return None


def _parse(kept: Mapping[str, Any]) -> _Derivative:
    import numpy as np

    from elementgrad._explain.differences import EPSILON

    numbers = np.array([float.fromhex(text) for text in kept["hex"]])
    is_complex = numbers.size > math.prod(kept["shape"])
    array = (numbers.view(np.complex128) if is_complex else numbers).reshape(kept["shape"])
    return _Derivative(max([kept["dtype"]], key=EPSILON.__getitem__), array)


def _parts(array: "np.ndarray") -> "np.ndarray":
    """Return all numbers in a row, of complex ones both parts."""
    import numpy as np

    flat = np.ascontiguousarray(array).reshape(-1)
    return flat.view(np.float64) if flat.dtype.kind == "f" else flat.astype(np.complex128).view(np.float64)


def _write(path: Path, text: str) -> None:
    from elementgrad._files import replace_file

    path.parent.mkdir(exist_ok=True)
    replace_file(path, text.encode())


def _compare(path: Path, values: Mapping[str, _Derivative], scales: Callable[[], Mapping[str, float]]) -> str | None:
    """Return what differs from the file; None if nothing does. `scales` takes more runs, and is called if need be."""
    if not path.exists():
        return f"there is no {FOLDER}/{path.name} yet; run pytest --update-gradients to write it, and commit it"
    kept = _from_json(path.read_bytes())
    if kept is None:
        return f"{FOLDER}/{path.name} is no snapshot of this format; run pytest --update-gradients to write it anew"
    if list(kept) != list(values):
        return (
            f"{FOLDER}/{path.name} has {', '.join(kept)}, and now there are {', '.join(values)}; run pytest "
            "--update-gradients if that is meant"
        )
    lines = [line for name, each in values.items() for line in _differences(name, each, kept[name])]
    if lines:
        known = scales()
        lines = [line for name, each in values.items() for line in _differences(name, each, kept[name], known[name])]
    if not lines:
        return None
    return "\n".join(
        [f"{FOLDER}/{path.name}: the derivative has changed; run pytest --update-gradients if that is meant", *lines]
    )


def _differences(name: str, now: _Derivative, kept: _Derivative, scale: float = 0.0) -> list[str]:
    import numpy as np

    from elementgrad._explain.differences import BLURRED, EPSILON, SLACK

    shape = now.array.shape
    if kept.array.shape != shape:
        return [f"{name} had shape {kept.array.shape}, and has {shape}"]
    if kept.array.dtype.kind != now.array.dtype.kind and "c" in (kept.array.dtype.kind, now.array.dtype.kind):
        return [f"{name} is {'complex' if now.array.dtype.kind == 'c' else 'real'} now"]
    before, after = _parts(kept.array), _parts(now.array)
    coarser = max((kept.dtype, now.dtype), key=EPSILON.__getitem__)
    # As in `eg.check`: some units of rounding of the summands, whose size the largest number stands for.
    share = min(BLURRED * EPSILON[coarser], SLACK[coarser])
    bound = share * float(np.max(np.abs(before[np.isfinite(before)]), initial=scale))
    with np.errstate(invalid="ignore"):
        same = (np.abs(after - before) <= bound) | (after == before) | (np.isnan(before) & np.isnan(after))
    wrong = np.flatnonzero(~same)
    if not wrong.size:
        return []
    parts = 2 if now.array.dtype.kind == "c" else 1
    lines = [f"{name}: {wrong.size} of {before.size} numbers differ by more than {bound:.2g} ({coarser})"]
    for number in wrong[:SHOWN]:
        index = [int(n) for n in np.unravel_index(number // parts, shape)]
        lines.append(f"  {name}{index or ''}: was {float(before[number])}, is {float(after[number])}")
    return lines + ([f"  and {wrong.size - SHOWN} more"] if wrong.size > SHOWN else [])
