"""`Place`, a tensor and some of its elements, and `eg.at`, which makes places."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

from elementgrad._backends import registry
from elementgrad._backends.base import Backend
from elementgrad._backends.source_location import spelled_as
from elementgrad._html import box, never_raise
from elementgrad._place import edit, grammar
from elementgrad._place.index import Index, IndexArray, denormalize, normalize, to_text
from elementgrad._place.selection import Selection, Shape, resolve
from elementgrad.errors import PlaceError, SelectionError, quoted

Tensor = Any
COORDS_HINT = "coords takes ints, one row per element and one column per axis, such as [[0, 5], [1, 12]]"


class Place:
    """A tensor, given itself or by name, and some of its elements. Make one with `eg.at`.

    On a live tensor it reads and edits these elements, functionally: nothing is changed in place, and gradients reach
    the tensor and the value exactly.

    >>> import torch, elementgrad as eg
    >>> v = torch.tensor([1.0, 2.0, 3.0, 4.0])
    >>> eg.at(v)[2].set(10.0)
    tensor([ 1.,  2., 10.,  4.])
    >>> print(eg.at("conv1")[0, 12, 5:9])
    conv1[0, 12, 5:9]
    """

    __module__ = "elementgrad"

    __slots__ = ("_backend", "_index", "_kind", "_later", "_name", "_pointwise", "_tensor", "_write")

    def __init__(
        self,
        tensor: Tensor = None,
        name: str | None = None,
        index: Index = (),
        kind: str | None = None,
        backend: Backend | None = None,
        pointwise: bool = False,
        later: bool = False,
        write: int | None = None,
    ):
        self._tensor = tensor
        self._name = name
        self._index = index
        self._kind = kind
        self._backend = backend
        self._pointwise = pointwise
        self._later = later  # made while compiling: the index is as the user wrote it
        self._write = write

    @property
    def tensor(self) -> Tensor:
        """The live tensor, or None."""
        return self._tensor

    @property
    def name(self) -> str | None:
        """The name of the tensor in a model or function, or None."""
        return self._name

    @property
    def index(self) -> Index:
        """The index in normal form; `()` is the whole tensor."""
        return normalize(self._index, self._backend) if self._later else self._index

    @property
    def kind(self) -> str | None:
        """The kind of tensor that the name means, where two have the same name; or None."""
        return self._kind

    @property
    def pointwise(self) -> bool:
        """True if the elements were given by their coordinates, one row each."""
        return self._pointwise

    @property
    def write(self) -> int | None:
        """The write of each element that is meant, in a recording; None for the last that matters."""
        return self._write

    @classmethod
    def parse(cls, source: str) -> "Place":
        """Return the place that a text describes; the text is parsed, never evaluated.

        Args:
            source: the text, such as `"fc.weight[3, :]"`.

        Returns:
            The place.

        Raises:
            ParseError: the text does not parse; the message marks the character.

        >>> import elementgrad as eg
        >>> eg.Place.parse("fc.weight[3, :]") == eg.at("fc.weight")[3, :]
        True
        """
        if not isinstance(source, str):
            raise PlaceError(
                f"{type(source).__name__} is not the text of a place; give a str, such as 'fc.weight[3, :]'"
            )
        name, index, kind = grammar.parse(source)
        return cls(None, name, index, kind)

    __iter__ = None  # a place is not a sequence, though it has brackets

    def __getitem__(self, index: Any) -> "Place":
        if self._later or self._index:
            raise PlaceError(f"{self} is indexed already; write one index with commas, as in eg.at(x)[1, 2]")
        backend = self._backend
        if backend is not None and backend.is_compiling():
            return self._with_index(index, later=True)
        return self._with_index(normalize(index, backend))

    def _with_index(self, index: Any, pointwise: bool = False, later: bool = False) -> "Place":
        return Place(self._tensor, self._name, index, self._kind, self._backend, pointwise, later, self._write)

    def coords(self, rows: Any) -> "Place":
        """Name elements by their coordinates.

        Args:
            rows: one row of coordinates per element, in an array of shape (elements, axes).

        Returns:
            The place of these elements.

        >>> import torch, elementgrad as eg
        >>> eg.at(torch.arange(12.0).reshape(3, 4)).coords([[0, 1], [2, 3]]).get()
        tensor([ 1., 11.])
        """
        try:
            table = rows if hasattr(rows, "shape") else np.asarray(rows)
        except ValueError:
            table = np.zeros(0)
        if len(table.shape) != 2 or not table.shape[1]:
            raise SelectionError(COORDS_HINT)
        if self._backend is not None:
            self._require_columns(table.shape[1], self._backend.shape(self._tensor))
        place = self[tuple([table[:, axis] for axis in range(table.shape[1])])]
        if not place._later and any(isinstance(column, IndexArray) and column.boolean for column in place._index):
            raise SelectionError(COORDS_HINT)
        return self._with_index(place._index, pointwise=True, later=place._later)

    def select(self, shape: tuple[int, ...] | None = None) -> Selection:
        """Resolve the index against a shape.

        Args:
            shape: the shape of the tensor; None for that of the place's own tensor.

        Returns:
            The elements that are named.

        >>> import elementgrad as eg
        >>> eg.at("fc.weight")[3, :].select(shape=(10, 4)).flat().tolist()
        [12, 13, 14, 15]
        """
        if shape is None:
            shape = self._live("select").shape(self._tensor)
        return self._resolve(shape)

    @spelled_as("eg.at(...).get")
    def get(self) -> Tensor:
        """Return the named elements: `x[index]` as NumPy means it, on every framework; elements may repeat.

        >>> import torch, elementgrad as eg
        >>> eg.at(torch.tensor([1.0, 2.0, 3.0]))[::-1].get()
        tensor([3., 2., 1.])
        """
        return self._edit("get")

    @spelled_as("eg.at(...).set")
    def set(self, value: Any) -> Tensor:
        """Return a copy with the named elements replaced.

        Args:
            value: a number, array or tensor that broadcasts to the named elements.

        Returns:
            The copy. The replaced elements get no gradient; the value gets theirs.

        Raises:
            DuplicateError: an element is named twice.

        >>> import torch, elementgrad as eg
        >>> v, value = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor(7.0)
        >>> loss = lambda v, value: (eg.at(v)[0].set(value) ** 2).sum()
        >>> torch.func.grad(loss, argnums=(0, 1))(v, value)
        (tensor([0., 4., 6., 8.]), tensor(14.))
        """
        return self._edit("set", value)

    @spelled_as("eg.at(...).add")
    def add(self, value: Any) -> Tensor:
        """Return a copy with a value added to the named elements.

        Args:
            value: a number, array or tensor that broadcasts to the named elements. An element that is named twice gets
                both of its values.

        Returns:
            The copy.

        >>> import torch, elementgrad as eg
        >>> eg.at(torch.zeros(3))[[0, 0, 2]].add(torch.tensor([1.0, 10.0, 100.0]))
        tensor([ 11.,   0., 100.])
        """
        return self._edit("add", value)

    @spelled_as("eg.at(...).multiply")
    def multiply(self, value: Any) -> Tensor:
        """Return a copy with the named elements multiplied by a value.

        Args:
            value: a number, array or tensor that broadcasts to the named elements. An element that is named twice is
                multiplied by both of its values.

        Returns:
            The copy.

        >>> import torch, elementgrad as eg
        >>> eg.at(torch.ones(3))[[0, 0, 2]].multiply(torch.tensor([2.0, 3.0, 5.0]))
        tensor([6., 1., 5.])
        """
        return self._edit("multiply", value)

    @spelled_as("eg.at(...).apply")
    def apply(self, function: Callable[[Tensor], Any]) -> Tensor:
        """Return a copy with the named elements replaced by a function of them.

        Args:
            function: takes the named elements, and sees no others.

        Returns:
            The copy.

        >>> import torch, elementgrad as eg
        >>> eg.at(torch.tensor([-1.0, 4.0, 9.0]))[1:].apply(torch.sqrt)
        tensor([-1.,  2.,  3.])
        """
        self._live("apply")
        if not callable(function):
            raise PlaceError(f"apply takes a function of the named elements, and {function!r} is none")
        return self._edit("set", function(self._edit("take_copy")))

    @spelled_as("eg.at(...).only")
    def only(self) -> Tensor:
        """Return the same values, with a gradient for the named elements alone.

        >>> import torch, elementgrad as eg
        >>> loss = lambda v: (eg.at(v)[2].only() ** 2).sum()
        >>> torch.func.grad(loss)(torch.tensor([1.0, 2.0, 3.0, 4.0]))
        tensor([0., 0., 6., 0.])
        """
        return self._edit("only")

    @spelled_as("eg.at(...).stop")
    def stop(self) -> Tensor:
        """Return the same values, with a gradient for all but the named elements.

        >>> import torch, elementgrad as eg
        >>> loss = lambda v: (eg.at(v)[2].stop() ** 2).sum()
        >>> torch.func.grad(loss)(torch.tensor([1.0, 2.0, 3.0, 4.0]))
        tensor([2., 4., 0., 8.])
        """
        return self._edit("stop")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Place):
            return NotImplemented
        mine = (self._name, self._kind, self._write, self.index)
        return mine == (other._name, other._kind, other._write, other.index) and self._tensor is other._tensor

    def __hash__(self) -> int:
        return hash((id(self._tensor), self._name, self._kind, self._write, self.index))

    def __str__(self) -> str:
        name = self._name or ("" if self._tensor is None else "tensor")
        index = to_text(self.index or ((...,) if not name else ()))
        return f"{name}{'' if index == '[]' else index}{f' ({self._kind})' if self._kind else ''}"

    def __repr__(self) -> str:
        if self._backend is None:
            return f"Place.parse({str(self)!r})"
        write = "" if self._write is None else f" at write {self._write}"
        return f"<Place {self}{write} of {self._backend.name} {self._tensor.dtype} {tuple(self._tensor.shape)}>"

    @never_raise
    def _repr_html_(self) -> str:
        if self._backend is None:
            return box(str(self))
        write = "" if self._write is None else f", at write {self._write}"
        described = f"{self._backend.name} {self._backend.dtype(self._tensor)} {tuple(self._tensor.shape)}{write}"
        return box(str(self), [described])

    def _live(self, verb: str) -> Backend:
        if self._backend is None:
            raise PlaceError(f"{self} has no live tensor to {verb}; give the tensor itself, as in eg.at(x)[0]")
        return self._backend

    def _edit(self, verb: str, *values: Any) -> Tensor:
        if self._write is not None:
            raise PlaceError(
                f"{self!r} is about a write in a recording, which has no values to {verb}; leave write out"
            )
        backend, x = self._backend or self._live(verb), self._tensor
        if self._later or backend.is_compiling():
            return edit.run(verb, x, self._index if self._later else denormalize(self._index), *values)
        return edit.VERBS[verb](backend, x, self._resolve(backend.shape(x)), *values)

    def _require_columns(self, count: int, shape: Shape) -> None:
        if count != len(shape):
            raise SelectionError(f"coordinates in {count} columns for a tensor of {len(shape)} axes")

    def _resolve(self, shape: Shape) -> Selection:
        try:
            if self._pointwise:
                self._require_columns(len(self._index), shape)
            return resolve(self.index if self._later else self._index, shape)
        except SelectionError as error:
            raise SelectionError(f"{self}: {error}") from None


class At:
    """The type of `eg.at`. Call it with a tensor or a name, or index it for the tensor that a verb is about.

    >>> import torch, elementgrad as eg
    >>> x = torch.arange(6.0).reshape(2, 3)
    >>> eg.at(x)[1, 2].get()
    tensor(5.)
    >>> print(eg.at("conv1")[0, 12], eg.at("conv1[0, 12]"), eg.at[0, 5])
    conv1[0, 12] conv1[0, 12] [0, 5]
    """

    __slots__ = ()

    def __call__(self, target: Tensor | str | Place, *, kind: str | None = None, write: int | None = None) -> Place:
        """Return the place of all elements of a tensor; index it to name some of them.

        Args:
            target: a tensor, a name, the text of a place or a place.
            kind: the kind of tensor that a name means: "input", "output", "activation", "given" (what a module is
                given), "parameter" or "buffer".
            write: in a recording, which write of each element is meant, from the end if negative.

        Returns:
            The place.

        >>> import torch, elementgrad as eg
        >>> t = torch.tensor([3.0, 0.0])
        >>> with eg.record(t) as rec:
        ...     t[0] = t[0] * 2
        ...     t[1] = t[0] ** 2
        ...     t[0] = t[0] * 5
        ...     y = t[0] + t[1]
        >>> rec.grad(y, eg.at(t, write=0)[0]), rec.grad(y, eg.at(t)[0])
        (tensor(17.), tensor(1.))
        """
        if kind is not None and kind not in grammar.KINDS:
            raise PlaceError(f"kind {quoted(kind)} is none of {', '.join(grammar.KINDS)}")
        backend = registry.backend_of(target)
        if write is not None:
            _require_write(write, backend)
        if backend is not None and kind is None:
            return Place(target, None, (), None, backend, write=write)
        if isinstance(target, str):
            target = Place.parse(target)
        if not isinstance(target, Place):
            registry.require_backend(target)
            raise PlaceError(
                f"kind {quoted(kind)} tells two tensors of one name apart and this one was given itself; leave it out"
            )
        if kind not in (None, target.kind) and target.kind is not None:
            raise PlaceError(f"{target} is a place of kind {target.kind!r} and not {quoted(kind)}; give one kind")
        kind = kind or target.kind
        return Place(
            target.tensor, target.name, target.index, kind, target._backend, target.pointwise, write=target.write
        )

    def __getitem__(self, index: Any) -> Place:
        return Place(None, None, normalize(index))

    __iter__ = None

    def __repr__(self) -> str:
        return "elementgrad.at"


def _require_write(write: Any, backend: Backend | None) -> None:
    if isinstance(write, bool) or not isinstance(write, int):
        raise PlaceError(f"write={write!r} is not an int; give 0 for the first write of an element, -1 for the last")
    if backend is None:
        raise PlaceError(f"write={write} is about a live tensor in a recording; give the tensor itself, as in eg.at(t)")


at = At()
ONLY = Place()
"""The place of the only tensor there is."""


Named = str | Place | Tensor | None
"""What verbs take: the text of a place, a place, a tensor, or None for the only one there is."""


def parse_place(named: Named) -> Place:
    """Return the place that an argument of a verb means."""
    if named is None:
        return ONLY
    place = _parse_name(named) if isinstance(named, str) else named
    if isinstance(place, Place):
        return place
    if registry.backend_of(place) is None:
        registry.require_keras_on_tensorflow(place)
        raise PlaceError(
            f'{quoted(place)} names no tensor; give a name such as "x" or "output[0]", a place or a tensor'
        )
    return Place(place)


def is_pattern(name: str | None) -> bool:
    return name is not None and "*" in name


_parse_name = lru_cache(maxsize=1024)(Place.parse)
"""Kept, since parsing takes longer than most of what a small read does; places do not change."""


def parse_target(named: Named) -> Place:
    """Return the place of an output. It needs a name, since there is no tensor before the function has run."""
    place = parse_place(named)
    if place.tensor is not None:
        raise PlaceError(
            'of is given by name, as in of="output[0]", since the output is not there yet; an argument of the function '
            "by that name goes into kwargs={'of': ...}"
        )
    return place
