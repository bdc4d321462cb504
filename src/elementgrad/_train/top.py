"""`eg.top`: the elements of a model that matter most, by their gradients, their Fisher information or their size.

The backend hands over the gradient of one parameter at a time. `Ranking` keeps the k best elements of all parameters
so far, and their lowest score lets the backend skip what cannot be among them.
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
from elementgrad._names.names import expand_place
from elementgrad._place.grammar import listed, nearest
from elementgrad._place.place import Place, parse_place
from elementgrad._place.selection import Selection
from elementgrad._read.jacobian import Reason
from elementgrad._train.routing import explain_unconnected
from elementgrad.errors import DtypeError, FrameworkError, OptionError, PlaceError, UnconnectedError

Tensor = Any
By = Literal["gradient", "fisher", "magnitude", "random"]
MEASURES = {"gradient": "gradient", "fisher": "sum of squared gradients", "magnitude": "value", "random": "chance"}
ROOM = 2**16
"""The least number of elements that are collected before the best of them are selected."""


@not_compiled
def top(
    model: Callable[..., Any],
    loss_fn: Callable[[Any], Any] | None,
    k: int,
    by: By = "gradient",
    *,
    among: Any = None,
    since: Any = None,
    seed: int = 0,
) -> list[Place]:
    """Find the k elements of a model's parameters with the largest score, as places that `eg.trainable` takes.

    Dense gradients never pile up: each is ranked and dropped as soon as it is there. Nothing is disturbed.

    Args:
        model: A `torch.nn.Module`, a Keras model or a pytree of `jax.Array`.
        loss_fn: `loss_fn(model)` returns one loss, a vector of losses or an iterable of them; in JAX it is a function
            of the pytree. For Fisher information each number is an example, otherwise they add up. A generator of
            losses keeps the graph of one alone in PyTorch, and is run again for each group of parameters.
        k: The number of elements.
        by: `"gradient"` ranks by the size of the derivative of the loss, `"fisher"` by the sum of its squares over
            examples, `"magnitude"` by the size of the element or, with `since`, by how far it has moved. `"random"`
            draws them with equal chances, as baselines do; it needs no loss.
        among: The parameters to choose from, or some of their elements; by default all that are floating point,
            frozen ones too.
        since: A state dict or a model of the same architecture, from which elements have moved.
        seed: The seed of the random draw: the same one gives the same elements.

    Returns:
        One place for each parameter that has chosen elements.

    >>> import torch, elementgrad as eg
    >>> model = torch.nn.Linear(3, 2)
    >>> x = torch.tensor([[1.0, -5.0, 2.0]])
    >>> for place in eg.top(model, lambda model: (model(x) * torch.tensor([1.0, 3.0])).sum(), k=3):
    ...     print(place)
    weight[[0, 1, 1], [1, 1, 2]]
    >>> [str(place) for place in eg.top(model, lambda model: model(x)[0, 1], k=1, among="bias")]
    ['bias[[1]]']
    """
    limit = _check_k(k)
    _check_measure(by, loss_fn, since)
    seed = _check_seed(seed)
    backend = registry.backend_of_model(model)
    if backend is None:
        raise registry.no_model_error(model, "is not a model with parameters")
    named_model = backend.names.model(model)
    candidates = _find_candidates(named_model, among, backend)
    size = sum(candidate.size for candidate in candidates)
    if limit > size:
        raise OptionError(f"k={limit} is more than the {size} elements that there are to choose from; choose fewer")
    if by == "random":
        return _draw(candidates, size, limit, seed)
    ranking = Ranking(limit, candidates, MEASURES[by], backend)
    if loss_fn is None or by == "magnitude":
        earlier = [None] * len(candidates) if since is None else _earlier(since, candidates, named_model, backend)
        for candidate, tensor in zip(candidates, earlier, strict=True):
            ranking.offer(candidate.name, candidate.tensor, tensor)
    else:
        parameters = {candidate.name: candidate.tensor for candidate in candidates}

        def losses(model: Any = model) -> Iterable[Tensor]:
            return _check_losses(loss_fn(model), backend)

        backend.load("top").parameter_gradients(named_model, parameters, losses, by == "fisher", ranking.offer)
        ranking.require_reached(partial(explain_unconnected, loss_fn, model))
    if since is not None and not ranking.best.highest:
        raise OptionError(
            "no element has changed since then; give a copy made before, as a state dict shares the memory of its model"
        )
    return ranking.places()


@dataclass(frozen=True, eq=False)
class Candidate:
    """A parameter, and which of its elements may be chosen."""

    name: str
    tensor: Tensor
    shape: tuple[int, ...]
    positions: np.ndarray | None = None
    """Positions in the flattened tensor, ascending; None for all."""

    @property
    def size(self) -> int:
        """The number of elements that may be chosen."""
        return math.prod(self.shape) if self.positions is None else len(self.positions)

    def place(self, positions: np.ndarray) -> Place:
        """Return the place of some elements."""
        whole = Place(None, self.name)
        return whole.coords(Selection.at_flat(positions, self.shape).coords()) if self.shape else whole


class Ranking:
    """Ranks the elements of all candidates, whose scores come one tensor at a time."""

    def __init__(self, limit: int, candidates: list[Candidate], measure: str, backend: Backend):
        self.best = TopElements(limit)
        self._limit = limit
        self._candidates = candidates
        self._numbers = {candidate.name: number for number, candidate in enumerate(candidates)}
        self._measure = measure
        self._backend = backend
        self._reached: set[str] = set()

    def offer(self, name: str, scores: Tensor, minus: Tensor | None = None) -> None:
        """Rank the elements of a parameter by the size of their scores; the tensor is not kept."""
        number = self._numbers[name]
        candidate = self._candidates[number]
        self._reached.add(name)
        if candidate.positions is not None:
            some = Selection.at_flat(candidate.positions, candidate.shape)
            scores = self._backend.take(scores, some)
            minus = None if minus is None else self._backend.take(minus, some)
        sizes, positions = self._backend.load("top").topk_abs(scores, self._limit, self.best.floor, minus)
        if candidate.positions is not None:
            positions = candidate.positions[positions]
        infinite = ~np.isfinite(sizes)
        if infinite.any():
            raise PlaceError(
                f"{candidate.place(positions[infinite][:1])} has a {self._measure} of {sizes[infinite][0]}, which "
                "cannot be ranked; make it finite, or leave it out with among="
            )
        self.best.offer(number, sizes, positions)

    def require_reached(self, explain: Callable[[str], Reason | None]) -> None:
        """Raise an `UnconnectedError` if the loss depends on fewer than k elements; `explain` may know why on none."""
        reached = [candidate for candidate in self._candidates if candidate.name in self._reached]
        others = listed([candidate.name for candidate in self._candidates if candidate.name not in self._reached])
        if not reached:
            first = self._candidates[0].name
            reason = explain(first)
            hint = "" if reason is None else f"; as to {first}, {reason[0]}; {reason[1]}"
            raise UnconnectedError(f"the loss depends on no parameter that there is to choose from: {others}{hint}")
        size = sum(candidate.size for candidate in reached)
        if self._limit > size:
            raise UnconnectedError(
                f"k={self._limit} is more than the {size} elements that the loss depends on, as it does not on "
                f"{others}; choose fewer"
            )

    def places(self) -> list[Place]:
        """Return one place for each parameter that has chosen elements."""
        numbers, positions = self.best.select()
        return [self._candidates[number].place(positions[numbers == number]) for number in np.unique(numbers)]


class TopElements:
    """The elements with the largest scores among all that were offered; of equal ones, the first."""

    def __init__(self, limit: int):
        self.floor = 0.0
        """A score below which no element is chosen."""
        self.highest = 0.0
        self._limit = limit
        self._offers: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []

    def offer(self, number: int, scores: np.ndarray, positions: np.ndarray) -> None:
        """Add elements of the parameter of a number."""
        self.highest = max(self.highest, scores.max(initial=0.0))
        self._offers.append((scores, np.full(len(scores), number), positions))
        if sum(len(scores) for scores, *_ in self._offers) > 2 * max(self._limit, ROOM):
            self._prune()

    def select(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the numbers of the parameters and the positions in them, in order."""
        self._prune()
        _, numbers, positions = self._offers[0]
        order = np.lexsort((positions, numbers))
        return numbers[order], positions[order]

    def _prune(self) -> None:
        scores, numbers, positions = (np.concatenate(arrays) for arrays in zip(*self._offers, strict=True))
        if len(scores) > self._limit:
            self.floor = float(np.partition(scores, -self._limit)[-self._limit])
            above = np.flatnonzero(scores > self.floor)
            level = np.flatnonzero(scores == self.floor)
            first = np.lexsort((positions[level], numbers[level]))[: self._limit - len(above)]
            best = np.concatenate([above, level[first]])
            scores, numbers, positions = scores[best], numbers[best], positions[best]
        self._offers = [(scores, numbers, positions)]


def _check_k(k: Any) -> int:
    try:
        limit = 0 if isinstance(k, bool) else as_int(k)
    except TypeError:
        limit = 0
    if limit < 1:
        raise OptionError(f"k={k!r} is not a number of elements; give an int of at least 1")
    return limit


def _check_measure(by: Any, loss_fn: Any, since: Any) -> None:
    if not isinstance(by, str) or by not in MEASURES:
        raise OptionError(f'by={by!r} is none of "gradient", "fisher", "magnitude" and "random"; give one of them')
    if since is not None and by != "magnitude":
        raise OptionError(f'since= is the state before training, and by={by!r} does not use it; use by="magnitude"')
    if not callable(loss_fn) and not (loss_fn is None and by in ("magnitude", "random")):
        raise OptionError(
            f"loss_fn={loss_fn!r} cannot be called; give a function of the model, as in lambda model: loss(model(x), y)"
        )


def _check_seed(seed: Any) -> int:
    try:
        number = as_int(seed)
    except TypeError:
        number = -1
    if number < 0:
        raise OptionError(f"seed={seed!r} is not a seed; give an int of at least 0")
    return number


def _draw(candidates: list[Candidate], size: int, limit: int, seed: int) -> list[Place]:
    """Return `limit` elements of all candidates, drawn with equal chances and without repeats."""
    drawn = np.sort(np.random.Generator(np.random.PCG64(seed)).choice(size, limit, replace=False, shuffle=False))
    places, start = [], 0
    for candidate in candidates:
        end = start + candidate.size
        own = drawn[np.searchsorted(drawn, start) : np.searchsorted(drawn, end)] - start
        if own.size:
            places.append(candidate.place(own if candidate.positions is None else candidate.positions[own]))
        start = end
    return places


def _find_candidates(model: Model, among: Any, backend: Backend) -> list[Candidate]:
    """Return the floating-point parameters that `among` names, in the model's order; all of them for None."""
    params = [(name, tensor) for name, kind, tensor in model.named_tensors() if kind == "parameter"]
    floating = [(name, tensor) for name, tensor in params if backend.kind(tensor) == "f"]
    if not floating:
        raise DtypeError("the model has no floating-point parameter to choose from; give one that has")
    if among is None:
        return [Candidate(name, tensor, tuple(backend.shape(tensor))) for name, tensor in floating]
    single = isinstance(among, str | Place) or not isinstance(among, Iterable) or registry.backend_of(among) is not None
    places: dict[int, list[Place]] = {}
    for named in map(parse_place, [among] if single else among):
        for place in expand_place(named, floating, model.aliases):
            places.setdefault(_parameter_number(place, params, model, backend), []).append(place)
    if not places:
        raise PlaceError("among names no parameter; name some, or leave it out to choose among all")
    return [_candidate(*params[number], places[number], backend) for number in sorted(places)]


def _parameter_number(place: Place, params: list[tuple[str, Tensor]], model: Model, backend: Backend) -> int:
    if place.write is not None:
        raise PlaceError(f"{place!r} is about a write in a recording, and this is a model; leave write out")
    if place.tensor is None and place.name is None:
        raise PlaceError(
            f"{place} says which elements and not of which parameter; name it, as in {params[0][0]}{place}"
        )
    names = [name for name, _ in params]
    if place.name in names and place.kind in (None, "parameter"):
        return names.index(place.name)
    if place.tensor is None:
        tensor = _find_parameter(model, place.name)
    else:
        tensor = backend.names.unwrap_parameter(place.tensor)
    for number, (_, other) in enumerate(params):
        if other is tensor and place.kind in (None, "parameter"):
            return number
    if place.name is None:
        raise PlaceError(f"the tensor is not a parameter of the model; name one, {nearest('', names)}")
    raise PlaceError(f"no parameter is named {place.name!r}; {nearest(place.name, names)}")


def _find_parameter(model: Model, name: str | None) -> Tensor | None:
    return next((tensor for kind, tensor in model.lookup(name or "") if kind == "parameter"), None)


def _candidate(name: str, tensor: Tensor, places: list[Place], backend: Backend) -> Candidate:
    """Return a parameter with the elements that one or more places name of it."""
    if backend.kind(tensor) != "f":
        raise DtypeError(f"{name} is of dtype {backend.dtype(tensor)}; choose among floating-point parameters")
    shape = tuple(backend.shape(tensor))
    selections = [Place(None, name, place.index, pointwise=place.pointwise).select(shape) for place in places]
    if any(selection.whole for selection in selections):
        return Candidate(name, tensor, shape)
    positions = np.unique(np.concatenate([selection.flat().reshape(-1) for selection in selections]))
    return Candidate(name, tensor, shape, positions)


def _earlier(since: Any, candidates: list[Candidate], model: Model, backend: Backend) -> list[Tensor]:
    """Return the earlier tensor of each candidate, from a state dict or another model."""
    if registry.backend_of_model(since) is backend:
        other = backend.names.model(since)
        names = [name for name, kind, _ in other.named_tensors() if kind == "parameter"]
        earlier = {candidate.name: _find_parameter(other, candidate.name) for candidate in candidates}
    elif isinstance(since, Mapping):
        # By any of its names: of tied parameters a file may hold the second one alone.
        aliases = [(name, model.lookup(name)) for name in since if isinstance(name, str)]
        known = {id(x): since[name] for name, bearers in aliases for kind, x in bearers if kind == "parameter"}
        earlier = {candidate.name: known.get(id(candidate.tensor)) for candidate in candidates}
        names = [name for name in since if isinstance(name, str)]
    else:
        raise OptionError(
            f"since={type(since).__name__} holds no earlier parameters; give a state dict or a model of {backend.name}"
        )
    for candidate in candidates:
        tensor = earlier[candidate.name]
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
    return [earlier[candidate.name] for candidate in candidates]


def _check_losses(returned: Any, backend: Backend) -> Iterable[Tensor]:
    """Return the losses of the user's function, checked: a list, or an iterator if it returned one."""
    if registry.backend_of(returned) is not None:
        return [_check_loss(returned, "the loss", backend)]
    if isinstance(returned, str | bytes | Mapping) or not isinstance(returned, Iterable):
        raise FrameworkError(
            f"loss_fn gave {type(returned).__name__} and no loss; return a tensor of one number, a vector of losses, "
            "or a list or generator of them"
        )
    losses = _check_each(returned, backend)
    return list(losses) if isinstance(returned, list | tuple) else losses


def _check_each(losses: Iterable[Any], backend: Backend) -> Iterator[Tensor]:
    # By map and chain, without a local variable that would keep a loss and its graph while the next one is computed.
    numbers = count()

    def check(loss: Any) -> Tensor:
        return _check_loss(loss, f"loss {next(numbers)}", backend)

    checked = map(check, losses)
    first = list(islice(checked, 1))
    if not first:
        raise OptionError("loss_fn gave no loss at all; return at least one, each time that it is called")
    return chain(iter(first), checked)


def _check_loss(loss: Any, name: str, backend: Backend) -> Tensor:
    if registry.backend_of(loss) is not backend:
        raise FrameworkError(f"{name} is {type(loss).__name__} and no tensor of {backend.name}; return the tensor")
    if backend.kind(loss) != "f":
        raise DtypeError(f"{name} is of dtype {backend.dtype(loss)}, which cannot be ranked by; return a real number")
    shape = tuple(backend.shape(loss))
    if len(shape) > 1 or 0 in shape:
        raise OptionError(f"{name} of shape {shape} is neither a number nor a vector of losses; return its sum or mean")
    return loss
