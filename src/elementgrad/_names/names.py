"""`names`: a table of everything in a function or model that `of` and `wrt` can name."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from elementgrad._backends.registry import not_compiled
from elementgrad._html import Rows, Tabular
from elementgrad._names.call import NOTHING, BoundCall

Tensor = Any


@dataclass(frozen=True)
class Name:
    """One tensor of a function or model."""

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: str


class Names(Tabular, tuple[Name, ...]):
    """Names, printed as a table: inputs, then values in the order in which a run computes them, then the model's."""

    __slots__ = ()

    def _rows(self) -> Rows:
        rows = [("name", "kind", "shape", "dtype")]
        rows += [(row.name, row.kind, "x".join(map(str, row.shape)) or "()", row.dtype) for row in self]
        return rows


@not_compiled
def names(model: Callable[..., Any], *args: Any, kwargs: Mapping[str, Any] = NOTHING) -> Names:
    """List every tensor of a function or model that can be named, found by one run of it that disturbs nothing.

    Args:
        model: a function or model.
        args: its arguments.
        kwargs: its arguments by name.

    Returns:
        A tuple of rows with `name`, `kind`, `shape` and `dtype`, which prints as a table.

    >>> import torch, elementgrad as eg
    >>> model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.ReLU())
    >>> eg.names(model, torch.ones(1, 3))
    name      kind        shape  dtype
    input     input       1x3    float32
    0         activation  1x2    float32
    1         activation  1x2    float32
    output    output      1x2    float32
    0.weight  parameter   2x3    float32
    0.bias    parameter   2      float32
    """
    call = BoundCall(model, args, kwargs)
    backend = call.backend
    with backend.isolated(model):
        capture = call.capture_all()
    inputs = [(ref.name, "input", ref.tensor) for ref in call.inputs]

    def row(name: str, kind: str, tensor: Tensor) -> Name:
        return Name(name, kind, tuple(backend.shape(tensor)), backend.dtype(tensor))

    return Names(
        [
            *[row(*named) for named in inputs],
            *[Name(name, value.kind, *capture.described[value]) for name, value in capture.named_values()],
            *[row(*named) for named in call.model.named_tensors()],
        ]
    )
