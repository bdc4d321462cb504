"""The parameters that a choice is made among, and what they were before.

`top`: the elements of a model that matter most, by their gradients, their Fisher information or their size.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain, count, islice
from operator import index as as_int
from typing import Any, Literal

import numpy as np

from elementgrad._backends import registry
from elementgrad._backends.base import Backend
from elementgrad._backends.registry import not_compiled
from elementgrad._names.backend import Model
from elementgrad._place.grammar import listed, nearest
from elementgrad._place.place import Place
from elementgrad._place.selection import Selection
from elementgrad._read.api import parsed
from elementgrad._read.jacobian import Reason
from elementgrad._train.routing import explain_unconnected
from elementgrad.errors import DtypeError, FrameworkError, OptionError, PlaceError, UnconnectedError

Tensor = Any


@dataclass(frozen=True, eq=False)
class Candidate:
    """A parameter, and which of its elements may be chosen."""

    name: str
    tensor: Tensor
    shape: tuple[int, ...]
    positions: np.ndarray | None = None
    """In the flattened tensor, rising; None for all."""

    @property
    def size(self) -> int:
        """How many elements may be chosen."""
        return math.prod(self.shape) if self.positions is None else len(self.positions)


def candidates(model: Model, among: Any, backend: Backend) -> list[Candidate]:
    """The floating-point parameters of a model that somebody names, in the model's order; all of them for None."""
    held = [(name, tensor) for name, kind, tensor in model.named_tensors() if kind == "parameter"]
    floating = [(name, x) for name, x in held if backend.kind(x) == "f"]
    if not floating:
        raise DtypeError("the model has no floating-point parameter to choose from; give one that has")
    if among is None:
        return [Candidate(name, x, tuple(backend.shape(x))) for name, x in floating]
    single = isinstance(among, str | Place) or not isinstance(among, Iterable) or registry.backend_of(among) is not None
    named: dict[int, list[Place]] = {}
    for place in map(parsed, [among] if single else among):
        named.setdefault(_number(place, held, model, backend), []).append(place)
    if not named:
        raise PlaceError("among names no parameter; name some, or leave it out to choose among all")
    return [_narrowed(*held[number], named[number], backend) for number in sorted(named)]


def earlier(since: Any, found: list[Candidate], model: Model, backend: Backend) -> list[Tensor]:
    """What each parameter was then, by a state dict or another model."""
    if registry.backend_of_model(since) is backend:
        names = [name for name, kind, _ in backend.names.model(since).named_tensors() if kind == "parameter"]
        then = {candidate.name: _parameter(backend.names.model(since), candidate.name) for candidate in found}
    elif isinstance(since, Mapping):
        # By any of its names: of tied parameters a file may hold the second one alone.
        aliases = [(name, model.lookup(name)) for name in since if isinstance(name, str)]
        known = {id(x): since[name] for name, bearers in aliases for kind, x in bearers if kind == "parameter"}
        then = {candidate.name: known.get(id(candidate.tensor)) for candidate in found}
        names = [name for name in since if isinstance(name, str)]
    else:
        raise OptionError(
            f"since={type(since).__name__} holds no earlier parameters; give a state dict or a model of {backend.name}"
        )
    for candidate in found:
        tensor = then[candidate.name]
        if tensor is None:
            raise PlaceError(f"since holds no {candidate.name!r}; {nearest(candidate.name, names)}")
        if registry.backend_of(tensor) is not backend:
            raise FrameworkError(
                f"since holds {candidate.name} as {type(tensor).__name__}; give a tensor of {backend.name}"
            )
        if tuple(backend.shape(tensor)) != candidate.shape:
            raise OptionError(
                f"since holds {candidate.name} of shape {tuple(backend.shape(tensor))} and the model of shape "
                f"{candidate.shape}; give what it was before, of the same architecture"
            )
    return [then[candidate.name] for candidate in found]


def _number(place: Place, held: list[tuple[str, Tensor]], model: Model, backend: Backend) -> int:
    """Which parameter a place is about."""
    if place.write is not None:
        raise PlaceError(f"{place!r} is about a write in a recording, and this is a model; leave write out")
    if place.tensor is None and place.name is None:
        raise PlaceError(f"{place} says which elements and not of which parameter; name it, as in {held[0][0]}{place}")
    names = [name for name, _ in held]
    if place.name in names and place.kind in (None, "parameter"):
        return names.index(place.name)
    tensor = _parameter(model, place.name) if place.tensor is None else backend.names.unwrap_parameter(place.tensor)
    for number, (_, other) in enumerate(held):
        if other is tensor and place.kind in (None, "parameter"):
            return number
    if place.name is None:
        raise PlaceError(f"the tensor is no parameter of the model; name one, {nearest('', names)}")
    raise PlaceError(f"no parameter is named {place.name!r}; {nearest(place.name, names)}")


def _parameter(model: Model, name: str | None) -> Tensor | None:
    return next((x for kind, x in model.lookup(name or "") if kind == "parameter"), None)


def _narrowed(name: str, tensor: Tensor, places: list[Place], backend: Backend) -> Candidate:
    """A parameter with the elements that one or more places name of it."""
    if backend.kind(tensor) != "f":
        raise DtypeError(f"{name} is of dtype {backend.dtype(tensor)}; choose among floating-point parameters")
    shape = tuple(backend.shape(tensor))
    chosen = [Place(None, name, place.index, pointwise=place.pointwise).select(shape) for place in places]
    if any(selection.whole for selection in chosen):
        return Candidate(name, tensor, shape)
    positions = np.unique(np.concatenate([selection.flat().reshape(-1) for selection in chosen]))
    return Candidate(name, tensor, shape, positions)


By = Literal["gradient", "fisher", "magnitude"]
MEASURES = {"gradient": "gradient", "fisher": "sum of squared gradients", "magnitude": "value"}
ROOM = 2**16
"""How many elements wait, at least, before the best of them are found."""


@not_compiled
def top(
    model: Callable[..., Any],
    loss_fn: Callable[[Any], Any] | None,
    k: int,
    by: By = "gradient",
    *,
    among: Any = None,
    since: Any = None,
) -> list[Place]:
    """The k elements of a model's parameters with the largest score, as places that `eg.trainable` takes.

    `by="gradient"` ranks by the size of the derivative of the loss, `by="fisher"` by the sum of its squares over
    examples, `by="magnitude"` by the size of the element or, with `since` (a state dict or a model of the same
    architecture), by how far it has moved. `loss_fn(model)` gives one loss, a vector of losses or an iterable of them;
    for Fisher information each number is an example, otherwise they add up. What yields losses one by one (a
    generator) keeps the graph of one alone in PyTorch, and is asked again for each group of parameters. In JAX the
    model is a pytree of parameters, and `loss_fn` a function of it. `among` names the parameters to choose from, or
    some of their elements; by default all that are floating point, frozen ones too. Dense gradients never pile up: each
    is ranked and dropped as soon as it is there. Nothing is disturbed.

    >>> import torch, elementgrad as eg
    >>> model = torch.nn.Linear(3, 2)
    >>> x = torch.tensor([[1.0, -5.0, 2.0]])
    >>> for place in eg.top(model, lambda model: (model(x) * torch.tensor([1.0, 3.0])).sum(), k=3):
    ...     print(place)
    weight[[0, 1, 1], [1, 1, 2]]
    >>> [str(place) for place in eg.top(model, lambda model: model(x)[0, 1], k=1, among="bias")]
    ['bias[[1]]']
    """
    wanted = _counted(k)
    _require_measure(by, loss_fn, since)
    backend = registry.backend_of_model(model)
    if backend is None:
        raise FrameworkError(
            f"{type(model).__name__} is no model with parameters of its own; give a torch.nn.Module, a Keras model "
            "or a pytree of jax.Array, such as a dict of parameters"
        )
    held = backend.names.model(model)
    found = candidates(held, among, backend)
    size = sum(candidate.size for candidate in found)
    if wanted > size:
        raise OptionError(f"k={wanted} is more than the {size} elements that there are to choose from; choose fewer")
    ranking = Ranking(wanted, found, MEASURES[by], backend)
    if loss_fn is None or by == "magnitude":
        then = [None] * len(found) if since is None else earlier(since, found, held, backend)
        for candidate, tensor in zip(found, then, strict=True):
            ranking.offer(candidate.name, candidate.tensor, tensor)
    else:
        parameters = {candidate.name: candidate.tensor for candidate in found}

        def losses(given: Any = model) -> Iterable[Tensor]:
            return _losses(loss_fn(given), backend)

        backend.parameter_gradients(held, parameters, losses, by == "fisher", ranking.offer)
        ranking.require_reached(partial(explain_unconnected, loss_fn, model))
    if since is not None and not ranking.best.highest:
        raise OptionError(
            "no element has moved since then; give a copy made before, as a state dict shares the memory of its model"
        )
    return ranking.places()


class Ranking:
    """What the tensors of scores that come by one at a time leave behind: the best elements among all parameters."""

    def __init__(self, count: int, found: list[Candidate], measure: str, backend: Backend):
        self.best = TopElements(count)
        self._count = count
        self._found = found
        self._numbers = {candidate.name: number for number, candidate in enumerate(found)}
        self._measure = measure
        self._backend = backend
        self._reached: set[str] = set()

    def offer(self, name: str, scores: Tensor, minus: Tensor | None = None) -> None:
        """Rank the elements of a parameter by the size of their scores; the tensor is not kept."""
        number = self._numbers[name]
        candidate = self._found[number]
        self._reached.add(name)
        if candidate.positions is not None:
            some = Selection.at_flat(candidate.positions, candidate.shape)
            scores = self._backend.take(scores, some)
            minus = None if minus is None else self._backend.take(minus, some)
        sizes, positions = self._backend.load("top").topk_abs(scores, self._count, self.best.floor, minus)
        if candidate.positions is not None:
            positions = candidate.positions[positions]
        if not np.isfinite(sizes).all():
            place = _place(candidate, positions[~np.isfinite(sizes)][:1])
            raise PlaceError(
                f"{place} has a {self._measure} of {sizes[~np.isfinite(sizes)][0]}, which cannot be ranked; "
                "make it finite, or leave it out with among="
            )
        self.best.offer(number, sizes, positions)

    def require_reached(self, why: Callable[[str], Reason | None]) -> None:
        """The loss depends on enough elements; if on none, somebody may know why not on a parameter."""
        reached = [candidate for candidate in self._found if candidate.name in self._reached]
        others = listed([candidate.name for candidate in self._found if candidate.name not in self._reached])
        if not reached:
            first = self._found[0].name
            reason = why(first)
            more = "" if reason is None else f"; as to {first}, {reason[0]}; {reason[1]}"
            raise UnconnectedError(f"the loss depends on no parameter that there is to choose from: {others}{more}")
        size = sum(candidate.size for candidate in reached)
        if self._count > size:
            raise UnconnectedError(
                f"k={self._count} is more than the {size} elements that the loss depends on, as it does not on "
                f"{others}; choose fewer"
            )

    def places(self) -> list[Place]:
        """One place for each parameter that has chosen elements."""
        numbers, positions = self.best.chosen()
        return [_place(self._found[number], positions[numbers == number]) for number in np.unique(numbers)]


class TopElements:
    """The elements with the largest scores among all that were offered; of equal ones, those that come first."""

    def __init__(self, count: int):
        self.floor = 0.0
        """A score below which no element is chosen."""
        self.highest = 0.0
        self._count = count
        self._offers: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []

    def offer(self, number: int, scores: np.ndarray, positions: np.ndarray) -> None:
        """Some elements of a parameter, given by its number."""
        self.highest = max(self.highest, scores.max(initial=0.0))
        self._offers.append((scores, np.full(len(scores), number), positions))
        if sum(len(scores) for scores, *_ in self._offers) > 2 * max(self._count, ROOM):
            self._settle()

    def chosen(self) -> tuple[np.ndarray, np.ndarray]:
        """The numbers of the parameters and the positions in them, in order."""
        self._settle()
        _, numbers, positions = self._offers[0]
        order = np.lexsort((positions, numbers))
        return numbers[order], positions[order]

    def _settle(self) -> None:
        scores, numbers, positions = (np.concatenate(parts) for parts in zip(*self._offers, strict=True))
        if len(scores) > self._count:
            self.floor = float(np.partition(scores, -self._count)[-self._count])
            above = np.flatnonzero(scores > self.floor)
            level = np.flatnonzero(scores == self.floor)
            first = np.lexsort((positions[level], numbers[level]))[: self._count - len(above)]
            kept = np.concatenate([above, level[first]])
            scores, numbers, positions = scores[kept], numbers[kept], positions[kept]
        self._offers = [(scores, numbers, positions)]


def _place(candidate: Candidate, positions: np.ndarray) -> Place:
    whole = Place(None, candidate.name)
    return whole.coords(Selection.at_flat(positions, candidate.shape).coords()) if candidate.shape else whole


def _counted(k: Any) -> int:
    try:
        wanted = 0 if isinstance(k, bool) else as_int(k)
    except TypeError:
        wanted = 0
    if wanted < 1:
        raise OptionError(f"k={k!r} is not a number of elements; give an int of at least 1")
    return wanted


def _require_measure(by: Any, loss_fn: Any, since: Any) -> None:
    if not isinstance(by, str) or by not in MEASURES:
        raise OptionError(f'by={by!r} is none of "gradient", "fisher" and "magnitude"; give one of them')
    if since is not None and by != "magnitude":
        raise OptionError(f'since= says from where elements have moved, and by={by!r} does not ask; use by="magnitude"')
    if not callable(loss_fn) and not (loss_fn is None and by == "magnitude"):
        raise OptionError(
            f"loss_fn={loss_fn!r} cannot be called; give a function of the model, as in lambda model: loss(model(x), y)"
        )


def _losses(returned: Any, backend: Backend) -> Iterable[Tensor]:
    """What the user's function gave, checked: a list, or an iterator where it came as something that yields them."""
    if registry.backend_of(returned) is not None:
        return [_checked(returned, "the loss", backend)]
    if isinstance(returned, str | bytes | Mapping) or not isinstance(returned, Iterable):
        raise FrameworkError(
            f"loss_fn gave {type(returned).__name__} and no loss; return a tensor of one number, a vector of losses, "
            "or a list or generator of them"
        )
    several = _several(returned, backend)
    return list(several) if isinstance(returned, list | tuple) else several


def _several(losses: Iterable[Any], backend: Backend) -> Iterator[Tensor]:
    """Passed on without a variable that would keep a loss, and its graph, while the next is made."""
    numbers = count()

    def check(loss: Any) -> Tensor:
        return _checked(loss, f"loss {next(numbers)}", backend)

    checked = map(check, losses)
    first = list(islice(checked, 1))
    if not first:
        raise OptionError("loss_fn gave no loss at all; return at least one, each time that it is asked")
    return chain(iter(first), checked)


def _checked(loss: Any, name: str, backend: Backend) -> Tensor:
    if registry.backend_of(loss) is not backend:
        raise FrameworkError(f"{name} is {type(loss).__name__} and no tensor of {backend.name}; return the tensor")
    if backend.kind(loss) != "f":
        raise DtypeError(f"{name} is of dtype {backend.dtype(loss)}, which cannot be ranked by; return a real number")
    shape = tuple(backend.shape(loss))
    if len(shape) > 1 or 0 in shape:
        raise OptionError(f"{name} of shape {shape} is neither a number nor a vector of losses; return its sum or mean")
    return loss
