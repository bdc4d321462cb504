"""Results: numbers as text, as JSON that every parser takes, and as files."""

import io
import json
import math
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from elementgrad._backends.base import Backend
from elementgrad._cli.output import InputError, is_unicode
from elementgrad._files import replace_file, writable
from elementgrad._train.weights import ENDINGS, FileTensor, Weights

FORMAT = 1
"""Which form the objects of `--json` have; another number would be another form."""
ARRAYS = (".npy", ".npz", ".safetensors", ".json")
"""The files of arrays that are read and written."""
PICTURES = (".png", ".svg", ".pdf")
MOST = 1000
"""More numbers than these are shortened in text; files and JSON have all."""


@dataclass(frozen=True)
class GradientResult:
    """The derivative by one place, as NumPy has it."""

    wrt: str
    values: np.ndarray
    """In float32 where NumPy does not know the dtype."""
    dtype: str

    @classmethod
    def of(cls, wrt: str, tensor: Any, backend: Backend) -> "GradientResult":
        """A tensor as numbers."""
        values = backend.to_numpy(tensor)
        assert values is not None
        return cls(wrt, values, backend.dtype(tensor))

    def described(self) -> dict[str, Any]:
        """As an object of JSON."""
        return {"wrt": self.wrt, "shape": self.values.shape, "dtype": self.dtype, "values": plain(self.values)}


def require_writable(path: str | None, endings: tuple[str, ...]) -> None:
    """Refuse a path before any work if nothing can be written there."""
    if path is None:
        return
    if not path.endswith(endings):
        raise InputError(f"{path} has no ending that tells its format; give one of {', '.join(endings)}")
    writable(path, f"result{endings[0]}")


def write(path: str, gradients: list[GradientResult], told: Mapping[str, Any]) -> None:
    """Write gradients to a file, by their places where it holds several, as a whole or not at all."""
    if path.endswith(ENDINGS):
        Weights({one.wrt: FileTensor.of(one.values) for one in gradients}).write(path)
    elif path.endswith(".json"):
        replace_file(path, (to_json(told) + "\n").encode("utf-8", "backslashreplace"))
    else:
        file = io.BytesIO()
        np.save(file, gradients[0].values)
        replace_file(path, file.getvalue())


def text_of(values: np.ndarray) -> str:
    """Numbers for a person, or for the next program if there are few."""
    if not values.ndim:
        return str(values[()])
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 100
    return np.array2string(values, threshold=MOST, max_line_width=width, separator=", ")


def plain(value: Any) -> Any:
    """What JSON has: lists of numbers, with texts for those that are not finite; complex ones in two parts."""
    if isinstance(value, np.ndarray | np.generic):
        if value.dtype.kind == "c":
            return {"real": plain(value.real), "imag": plain(value.imag)}
        return plain(value.tolist())
    if isinstance(value, Mapping):
        return {name: plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def to_json(told: Mapping[str, Any], ascii: bool = False) -> str:
    """The text of an object, with all characters or by their numbers."""
    return json.dumps(plain({"format": FORMAT, **told}), allow_nan=False, ensure_ascii=ascii)


def show(text: str, told: Mapping[str, Any], as_json: bool) -> None:
    """Print a result: the text, or the object."""
    print(to_json(told, ascii=not is_unicode()) if as_json else text)
