"""Elements of parameters that are never written to, as in JAX: values apart, their gradient, and merging them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from elementgrad._html import Rows, Tabular
from elementgrad._place.grammar import listed, nearest
from elementgrad._read.jacobian import Reason
from elementgrad._train.history import Change, ChangeLog
from elementgrad._train.routing import routes, unconnected, why_apart
from elementgrad._train.trainer import FunctionalTrainer, ParameterUse, Trainer
from elementgrad.errors import FrameworkError, OptionError, PlaceError

Tensor = Any
Values = dict[str, Tensor]
"""The text of each place, and its values in one row: a pytree."""


@dataclass(frozen=True, repr=False)
class Uses(Tabular):
    """What a loss does with the parameters of which elements train, and where it costs as much as all of them.

    Made by `elements.plan`; printed it is a table.

    >>> import jax.numpy as jnp, elementgrad as eg
    >>> elements = eg.trainable({"w": jnp.ones((4, 3))}, "w[0, 1]")
    >>> uses = elements.plan(lambda params: (jnp.ones((2, 4)) @ params["w"]).sum())
    >>> uses.dense, uses.uses[0].operation
    (False, 'dot_general')
    """

    __module__ = "elementgrad"

    uses: tuple[ParameterUse, ...]
    """Name, operation and whether it is dense."""

    @property
    def dense(self) -> bool:
        """Whether a whole copy of any parameter is made, and a whole gradient."""
        return any(use.dense for use in self.uses)

    def _rows(self) -> Rows:
        rows = [("parameter", "operation", "cost")]
        return rows + [
            (use.name, use.operation, "dense" if use.dense else "of the elements alone") for use in self.uses
        ]


class Functional:
    """What elements can do where parameters are never written to."""

    _trainer: Trainer
    _members: tuple[Any, ...]

    @property
    def values(self) -> Values:
        """The values to optimise, as a dict from the text of a place to one row; assign it what came out in the end.

        >>> import jax, jax.numpy as jnp, elementgrad as eg
        >>> params = {"w": jnp.array([[0, 1, 2], [3, 4, 5]], "float32")}
        >>> elements = eg.trainable(params, "w[0, 1:]")
        >>> values = elements.values
        >>> values
        {'w[0, 1:]': Array([1., 2.], dtype=float32)}
        >>> gradient = elements.grad(lambda params: (params["w"] ** 2).sum(), values)
        >>> elements.values = jax.tree.map(lambda value, slope: value - 0.25 * slope, values, gradient)
        >>> elements["w[0, 1:]"]
        Array([0.5, 1. ], dtype=float32)
        """
        trainer = self._functional("values", "give elements.parameters() to an optimizer")
        self._require_training()
        return {str(member.place): trainer.value(member.part) for member in self._members}

    @values.setter
    def values(self, values: Mapping[str, Tensor]) -> None:
        trainer = self._functional("values", "write to what elements.parameters() gives")
        self._require_training()
        given = zip(self._members, self._checked(values), strict=True)
        kept = [trainer.keepable(member.part, value, str(member.place)) for member, value in given]
        places = [str(member.place) for member in self._members]
        trainer.check_same_on_all_ranks((place, np.asarray(value)) for place, value in zip(places, kept, strict=True))
        for member, value in zip(self._members, kept, strict=True):
            member.part.leaf = value

    def merge(self, values: Mapping[str, Tensor] | None = None, *, params: Any = None) -> Any:
        """The parameters with the values in them, in the structure in which they were given; modules are copies.

        Traced by `jax.jit`, `jax.grad` and `jax.vmap` as any other computation, and its gradient is a dense one:
        `grad` is what costs only as much as the elements. `params` are other parameters to put the values into.

        >>> import jax.numpy as jnp, elementgrad as eg
        >>> elements = eg.trainable({"w": jnp.zeros(3, "float32"), "b": jnp.ones(1, "float32")}, "w[1]")
        >>> elements.merge({"w[1]": jnp.array([5.0], "float32")})
        {'w': Array([0., 5., 0.], dtype=float32), 'b': Array([1.], dtype=float32)}
        """
        trainer = self._functional("merge", "the model itself has the values")
        parts = [member.part for member in self._members]
        merged, arrays = trainer.merged(parts, self._checked(values), params)
        if params is None:
            self._note(arrays)
        return merged

    def grad(
        self,
        loss_fn: Callable[[Any], Any] | Mapping[Any, Callable[[Any], Any]],
        values: Mapping[str, Tensor] | None = None,
        *,
        params: Any = None,
        has_aux: bool = False,
    ) -> Any:
        """The gradient of `loss_fn(params)` for the elements alone, as a dict like `values`.

        Where the loss looks up rows of a parameter, multiplies by it or convolves with it, no dense gradient is formed,
        nor a copy of the parameter; `plan` tells. Use it inside `jax.jit`, and give large parameters as `params` there
        so that they are arguments and not constants. `{place: loss_fn}` or `{(place, place): loss_fn}` lets each place
        hear its own loss: others have a gradient of zero. With `has_aux` the loss is a pair as in `jax.grad`, and so is
        what is returned.

        >>> import jax.numpy as jnp, elementgrad as eg
        >>> elements = eg.trainable({"table": jnp.ones((4, 3), "float32")}, ["table[0, 1]", "table[2, 0]"])
        >>> elements.grad(lambda params: 2 * params["table"][jnp.array([0, 0, 2])].sum())
        {'table[0, 1]': Array([4.], dtype=float32), 'table[2, 0]': Array([2.], dtype=float32)}
        >>> elements.grad({"table[2, 0]": lambda params: (params["table"][2] ** 2).sum()})
        {'table[0, 1]': Array([0.], dtype=float32), 'table[2, 0]': Array([2.], dtype=float32)}
        """
        if isinstance(loss_fn, Mapping):
            if has_aux:
                raise OptionError("has_aux goes with one loss_fn, and these are several; leave it out")
            return self._routed(loss_fn, values, params)
        returned, gradient = self.value_and_grad(loss_fn, values, params=params, has_aux=has_aux)
        return (gradient, returned[1]) if has_aux else gradient

    def value_and_grad(
        self,
        loss_fn: Callable[[Any], Any],
        values: Mapping[str, Tensor] | None = None,
        *,
        params: Any = None,
        has_aux: bool = False,
    ) -> tuple[Any, Values]:
        """What `loss_fn(params)` returns, and the gradient as `grad` gives it.

        >>> import jax.numpy as jnp, elementgrad as eg
        >>> elements = eg.trainable({"v": jnp.array([1, 2, 3, 4], "float32")}, "v[1]")
        >>> elements.value_and_grad(lambda params: (params["v"] ** 2).sum())
        (Array(30., dtype=float32), {'v[1]': Array([4.], dtype=float32)})
        """
        trainer = self._functional("grad", "call backward on the loss, or elements.backward({place: loss})")
        self._require_training()
        parts = [member.part for member in self._members]
        returned, found = trainer.gradient(loss_fn, parts, self._checked(values), params, range(len(parts)), has_aux)
        for member, gradient in zip(self._members, found, strict=True):
            if gradient is None:
                loss = (lambda params: loss_fn(params)[0]) if has_aux else loss_fn
                reason = self._why_apart(loss, values, params, member.name)
                raise unconnected(member.place, member.name, reason=reason)
        return returned, {str(member.place): each for member, each in zip(self._members, found, strict=True)}

    def plan(self, loss_fn: Callable[[Any], Any]) -> Uses:
        """How `grad` goes about a loss: which operations use the parameters, and for which a whole copy is needed.

        >>> import jax.numpy as jnp, elementgrad as eg
        >>> elements = eg.trainable({"w": jnp.ones((4, 3)), "scale": jnp.ones((2, 3))}, ["w[0, 1]", "scale[0]"])
        >>> elements.plan(lambda params: ((jnp.ones((2, 4)) @ params["w"]) * params["scale"]).sum())
        parameter  operation    cost
        w          dot_general  of the elements alone
        scale      mul          dense
        """
        trainer = self._functional("plan", "each layer says in its documentation what it costs")
        self._require_training()
        uses = trainer.uses(loss_fn, [member.part for member in self._members], self._checked(None))
        return Uses(tuple(uses))

    def _routed(
        self, losses: Mapping[Any, Callable[[Any], Any]], values: Mapping[str, Tensor] | None, params: Any
    ) -> Values:
        trainer = self._functional("grad", "elements.backward takes {place: loss}")
        self._require_training()
        given = self._checked(values)
        parts = [member.part for member in self._members]
        numbers = {id(member): number for number, member in enumerate(self._members)}
        total = [trainer.zeros(value) for value in given]
        for loss, mine in routes(trainer, self._members, losses, trainer.check_function):
            wanted = list(dict.fromkeys(numbers[id(member)] for _, member, _ in mine))
            _, gradients = trainer.gradient(loss, parts, given, params, wanted, False)
            for asked, member, chosen in mine:
                number = numbers[id(member)]
                gradient = gradients[wanted.index(number)]
                if gradient is None:
                    reason = self._why_apart(loss, values, params, member.name)
                    raise unconnected(asked.place, member.name, reason=reason)
                total[number] = trainer.joined(total[number], gradient, chosen)
        return {str(member.place): each for member, each in zip(self._members, total, strict=True)}

    def _why_apart(
        self, loss_fn: Callable[[Any], Any], values: Mapping[str, Tensor] | None, params: Any, name: str
    ) -> Reason | None:
        trainer = self._functional("grad", "elements.backward takes {place: loss}")
        parts = [member.part for member in self._members]
        return why_apart(loss_fn, trainer.merged(parts, self._checked(values), params)[0], name)

    def _checked(self, values: Mapping[str, Tensor] | None) -> Sequence[Tensor]:
        """One row for each place, of the right dtype and shape."""
        trainer = self._trainer
        assert isinstance(trainer, FunctionalTrainer)
        if values is None:
            return [trainer.value(member.part) for member in self._members]
        if not isinstance(values, Mapping):
            raise FrameworkError(f"values are a dict such as elements.values has, and this is {type(values).__name__}")
        texts = [str(member.place) for member in self._members]
        for text in values:
            if text not in texts:
                raise PlaceError(f"{text!r} is not one of these places; {nearest(str(text), texts)}")
        missing = [text for text in texts if text not in values]
        if missing:
            raise PlaceError(f"values has nothing for {listed(missing)}; give all that elements.values has")
        return [
            trainer.fitting(member.part, values[text], text) for member, text in zip(self._members, texts, strict=True)
        ]

    def _note(self, arrays: Mapping[int, Tensor]) -> None:
        """Remember of merged arrays what stood there before, so that other patches of them are known to fit."""
        for number, array in arrays.items():
            member = self._members[number]
            ledger = ChangeLog(array, partial(self._bytes, array))
            for mark in ChangeLog(self._trainer.lasting(member.tensor), partial(self._bytes, member.tensor)).marks():
                if mark not in ledger.marks():
                    ledger.add(mark)
            written = self._bytes(array, member.positions)
            ledger.add(Change(str(member.place), member.positions, member.mark.bits, written))

    def _bytes(self, tensor: Tensor, positions: np.ndarray) -> np.ndarray:
        return self._trainer.bits(tensor, positions)[1]

    def _functional(self, what: str, instead: str) -> FunctionalTrainer:
        if not isinstance(self._trainer, FunctionalTrainer):
            raise FrameworkError(f"{what} is for parameters that are never written to, as in jax; here {instead}")
        return self._trainer

    def _require_training(self) -> None:
        raise NotImplementedError
