"""`Elements`: the elements of a model that train, or of a patch that was applied, as one object.

In PyTorch and Keras the model itself has the values. In JAX nothing is written to: `values`, `grad` and `merge` work
on values that live apart from the parameters.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from elementgrad._backends.registry import not_compiled
from elementgrad._cleanup import defer, with_cleanup, with_rollback
from elementgrad._html import Rows, Tabular
from elementgrad._place.grammar import listed, nearest
from elementgrad._place.place import Place
from elementgrad._train.bits import BitArray
from elementgrad._train.entries import Entry, place_label
from elementgrad._train.fingerprint import fingerprint
from elementgrad._train.history import ElementChange, TensorHistory
from elementgrad._train.patch import Patch, shorten
from elementgrad._train.routing import differentiate, explain_unconnected, resolve, route_losses, unconnected_error
from elementgrad._train.trainer import (
    ElementGroup,
    FunctionalTrainer,
    ParameterUse,
    ResolvedPlace,
    Trainer,
    groups_by_tensor,
)
from elementgrad.errors import ElementgradError, FrameworkError, OptionError, PatchError, PlaceError

Tensor = Any
Values = dict[str, Tensor]
"""A pytree: the text of each place to its values, as a vector."""
LossFn = Callable[[Any], Any]


@dataclass(frozen=True, repr=False)
class Uses(Tabular):
    """The operations of a loss on parameters of which elements train, and which of them need whole parameters.

    Made by `elements.plan`; printed it is a table.

    >>> import jax.numpy as jnp, elementgrad as eg
    >>> elements = eg.trainable({"w": jnp.ones((4, 3))}, "w[0, 1]")
    >>> uses = elements.plan(lambda params: (jnp.ones((2, 4)) @ params["w"]).sum())
    >>> uses.dense, uses.uses[0].operation
    (False, 'dot_general')
    """

    __module__ = "elementgrad"

    uses: tuple[ParameterUse, ...]
    """The name of the parameter, the operation, and whether it is dense."""

    @property
    def dense(self) -> bool:
        """True if any parameter is copied whole, and has a whole gradient."""
        return any(use.dense for use in self.uses)

    def _rows(self) -> Rows:
        costs = {True: "dense", False: "of the elements alone"}
        return [("parameter", "operation", "cost"), *[(use.name, use.operation, costs[use.dense]) for use in self.uses]]


class Elements(Tabular):
    """Named elements of a model, with a small tensor for each place that an optimizer can update.

    Made by `eg.trainable` and `eg.apply`. It maps places to these tensors, in the order in which the places were given.

    >>> import torch, elementgrad as eg
    >>> model = torch.nn.Linear(3, 2)
    >>> elements = eg.trainable(model, ["weight[0, 1]", "bias"])
    >>> elements
    place         elements  shape  dtype
    weight[0, 1]  1         2x3    float32
    bias          2         2      float32
    >>> elements["bias"].shape, len(elements), elements.size
    (torch.Size([2]), 2, 3)
    """

    __module__ = "elementgrad"

    def __init__(self, trainer: Trainer, groups: Sequence[ElementGroup], training: bool):
        self._trainer = trainer
        self._groups = tuple(groups)
        self._training = training

    @property
    def places(self) -> tuple[Place, ...]:
        """The places, in the order in which they were given."""
        return tuple([group.place for group in self._groups])

    @property
    def size(self) -> int:
        """The number of elements."""
        return sum(len(group.positions) for group in self._groups)

    @property
    def training(self) -> bool:
        """True while they train: not for a patch that was only applied, and not after `release`."""
        return self._training

    @property
    def _undone(self) -> bool:
        return all(group.change.undone for group in self._groups)

    def parameters(self) -> Iterator[Tensor]:
        """Return the tensors to give to an optimizer: a vector for each place.

        >>> import torch, elementgrad as eg
        >>> model = torch.nn.Linear(3, 2)
        >>> elements = eg.trainable(model, ["weight[0, :]", "bias[1]"])
        >>> optimizer = torch.optim.AdamW(elements.parameters(), lr=0.1, weight_decay=0.1)
        """
        self._require("parameters")
        self._trainer.sync(self._groups)
        return iter([group.leaf for group in self._groups])

    @property
    def variables(self) -> list[Tensor]:
        """The Keras variables that hold the values: a vector for each place.

        `model.fit` moves them by itself; a loop of your own gives them to the tape and to the optimizer.

        >>> import numpy as np, keras, elementgrad as eg
        >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, name="fc")])
        >>> elements = eg.trainable(model, ["fc/kernel[0, :]", "fc/bias[1]"])
        >>> [variable.shape.as_list() for variable in elements.variables]
        [[2], [1]]
        """
        self._require("variables")
        return [group.leaf for group in self._groups]

    def __getitem__(self, place: Place | str) -> Tensor:
        self._require_training()
        self._trainer.sync(self._groups)
        return self._find(place).leaf

    def __iter__(self) -> Iterator[Place]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self._groups)

    def __contains__(self, place: Any) -> bool:
        try:
            self._find(place)
        except (PlaceError, IndexError):
            return False
        return True

    @with_cleanup
    def backward(self, losses: Mapping[Any, Tensor] | Tensor, *, retain_graph: bool = False) -> None:
        """Differentiate losses, each for its own places only, and add the gradients to those of the tensors.

        It is like `loss.backward()`, with one backward for each loss.

        Args:
            losses: `{place: loss}`, or `{(place, place): loss}` for several places of one loss; places that are left
                out get no gradient. One loss is for all places.
            retain_graph: Keep the graph for another backward, as in `torch.Tensor.backward`.

        >>> import torch, elementgrad as eg
        >>> table = torch.nn.Embedding(4, 3)
        >>> elements = eg.trainable(table, ["weight[0, 1]", "weight[2, 0]"])
        >>> rows = table(torch.tensor([0, 2]))
        >>> elements.backward({"weight[0, 1]": 2 * rows.sum(), "weight[2, 0]": 5 * rows.sum()})
        >>> elements["weight[0, 1]"].grad, elements["weight[2, 0]"].grad
        (tensor([2.]), tensor([5.]))
        """
        self._require("backward")
        gradients = differentiate(self._trainer, self._groups, losses, retain_graph)
        every_loss = list(losses.values()) if isinstance(losses, Mapping) else [losses]
        self._trainer.accumulate_gradients(self._groups, gradients, every_loss)

    @not_compiled
    def gradients(self, tape: Any, losses: Mapping[Any, Tensor] | Tensor) -> list[Tensor | None]:
        """Differentiate losses with a `tf.GradientTape`, each for its own places only.

        Args:
            tape: The tape that recorded the losses; several losses need a persistent one.
            losses: `{place: loss}`, or `{(place, place): loss}` for several places of one loss. One loss is for all
                places.

        Returns:
            A gradient for each of `variables`; None for places that are left out.

        >>> import tensorflow as tf, keras, elementgrad as eg
        >>> table = keras.layers.Embedding(4, 3, name="table")
        >>> _ = table(tf.constant([0]))
        >>> elements = eg.trainable(table, ["embeddings[0, 1]", "embeddings[2, 0]"])
        >>> with tf.GradientTape(persistent=True) as tape:
        ...     total = tf.reduce_sum(table(tf.constant([0, 2])))
        ...     losses = {"embeddings[0, 1]": 2 * total, "embeddings[2, 0]": 5 * total}
        >>> [gradient.numpy().tolist() for gradient in elements.gradients(tape, losses)]
        [[2.0], [5.0]]
        """
        self._require("gradients")
        return differentiate(self._trainer, self._groups, losses, tape=tape)

    @property
    def values(self) -> Values:
        """The values to optimise, as a dict from the text of a place to a vector; assign the final ones.

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
        return self._by_place([trainer.copy_value(group) for group in self._groups])

    @values.setter
    def values(self, values: Mapping[str, Tensor]) -> None:
        trainer = self._functional("values", "write to what elements.parameters() gives")
        self._require_training()
        checked = zip(self._groups, self._check_values(trainer, values), strict=True)
        leaves = self._by_place([trainer.new_leaf(group, value, str(group.place)) for group, value in checked])
        trainer.check_same_on_all_ranks((place, np.asarray(leaf)) for place, leaf in leaves.items())
        for group in self._groups:
            group.leaf = leaves[str(group.place)]

    @with_cleanup
    def merge(self, values: Mapping[str, Tensor] | None = None, *, params: Any = None) -> Any:
        """Return the parameters with the values in them; modules are copies.

        It is traced by `jax.jit`, `jax.grad` and `jax.vmap` as any other computation, and its gradient is a dense one:
        `grad` is what costs only as much as the elements.

        Args:
            values: A dict like `elements.values`; by default the values that the elements have.
            params: Other parameters of the same names and shapes to put the values into.

        Returns:
            Parameters of the structure in which they were given.

        >>> import jax.numpy as jnp, elementgrad as eg
        >>> elements = eg.trainable({"w": jnp.zeros(3, "float32"), "b": jnp.ones(1, "float32")}, "w[1]")
        >>> elements.merge({"w[1]": jnp.array([5.0], "float32")})
        {'w': Array([0., 5., 0.], dtype=float32), 'b': Array([1.], dtype=float32)}
        """
        trainer = self._functional("merge", "the model itself has the values")
        merged, arrays = trainer.merge(self._groups, self._check_values(trainer, values), params)
        if params is None:
            self._record_merge(arrays)
        return merged

    @with_cleanup
    def grad(
        self,
        loss_fn: LossFn | Mapping[Any, LossFn],
        values: Mapping[str, Tensor] | None = None,
        *,
        params: Any = None,
        has_aux: bool = False,
    ) -> Any:
        """Compute the gradient of `loss_fn(params)` for the elements only.

        Where the loss looks up rows of a parameter, multiplies by it or convolves with it, no dense gradient is formed,
        nor a copy of the parameter; `plan` tells. Use it inside `jax.jit`, and give large parameters as `params` there
        so that they are arguments and not constants.

        Args:
            loss_fn: A function of the parameters that returns one number; or `{place: loss_fn}` and
                `{(place, place): loss_fn}`, by which each place gets the gradient of its own loss and others zero.
            values: A dict like `elements.values`; by default the values that the elements have.
            params: Other parameters of the same names and shapes to compute with.
            has_aux: The loss returns a pair, as in `jax.grad`.

        Returns:
            A dict like `values`; with `has_aux` a pair of it and what else the loss returned.

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
            return self._routed_grad(loss_fn, values, params)
        returned, gradient = self.value_and_grad(loss_fn, values, params=params, has_aux=has_aux)
        return (gradient, returned[1]) if has_aux else gradient

    @with_cleanup
    def value_and_grad(
        self,
        loss_fn: LossFn,
        values: Mapping[str, Tensor] | None = None,
        *,
        params: Any = None,
        has_aux: bool = False,
    ) -> tuple[Any, Values]:
        """Compute `loss_fn(params)` and its gradient for the elements only.

        Args:
            loss_fn: A function of the parameters that returns one number.
            values: A dict like `elements.values`; by default the values that the elements have.
            params: Other parameters of the same names and shapes to compute with.
            has_aux: The loss returns a pair, as in `jax.grad`.

        Returns:
            What the loss returned, and a dict like `values`.

        >>> import jax.numpy as jnp, elementgrad as eg
        >>> elements = eg.trainable({"v": jnp.array([1, 2, 3, 4], "float32")}, "v[1]")
        >>> elements.value_and_grad(lambda params: (params["v"] ** 2).sum())
        (Array(30., dtype=float32), {'v[1]': Array([4.], dtype=float32)})
        """
        trainer = self._functional("grad", "call backward on the loss, or elements.backward({place: loss})")
        self._require_training()
        checked, every = self._check_values(trainer, values), range(len(self._groups))
        returned, gradients = trainer.value_and_grad(loss_fn, self._groups, checked, params, every, has_aux)
        for group, gradient in zip(self._groups, gradients, strict=True):
            if gradient is None:
                loss = (lambda params: loss_fn(params)[0]) if has_aux else loss_fn
                raise self._unconnected_error(trainer, group.place, group.name, loss, checked, params)
        return returned, self._by_place(gradients)

    def _routed_grad(self, losses: Mapping[Any, LossFn], values: Mapping[str, Tensor] | None, params: Any) -> Values:
        trainer = self._functional("grad", "elements.backward takes {place: loss}")
        self._require_training()
        checked = self._check_values(trainer, values)
        numbers = {id(group): number for number, group in enumerate(self._groups)}
        totals = [trainer.zeros_like(value) for value in checked]
        for loss, routes in route_losses(trainer, self._groups, losses, trainer.check_function):
            wanted = list(dict.fromkeys(numbers[id(group)] for _, group, _ in routes))
            _, gradients = trainer.value_and_grad(loss, self._groups, checked, params, wanted, False)
            for target, group, chosen in routes:
                number = numbers[id(group)]
                gradient = gradients[wanted.index(number)]
                if gradient is None:
                    raise self._unconnected_error(trainer, target.place, group.name, loss, checked, params)
                totals[number] = trainer.add_gradient(totals[number], gradient, chosen)
        return self._by_place(totals)

    @with_cleanup
    def plan(self, loss_fn: LossFn) -> Uses:
        """Show how `grad` computes a loss, without computing anything.

        Args:
            loss_fn: A function of the parameters that returns one number.

        Returns:
            The operations that use the parameters, and which of them need a copy of a whole one.

        >>> import jax.numpy as jnp, elementgrad as eg
        >>> elements = eg.trainable({"w": jnp.ones((4, 3)), "scale": jnp.ones((2, 3))}, ["w[0, 1]", "scale[0]"])
        >>> elements.plan(lambda params: ((jnp.ones((2, 4)) @ params["w"]) * params["scale"]).sum())
        parameter  operation    cost
        w          dot_general  of the elements alone
        scale      mul          dense
        """
        trainer = self._functional("plan", "each layer says in its documentation what it costs")
        self._require_training()
        return Uses(tuple(trainer.parameter_uses(loss_fn, self._groups, self._check_values(trainer, None))))

    def save(self, path: str | os.PathLike[str], *, full: bool = False) -> None:
        """Write a patch: the places, their values, their original values, and fingerprints of the tensors.

        Where several processes share the parameters, all of them call this, and the first one writes.

        Args:
            path: The file to write, as a whole or not at all.
            full: Know the tensors by all of their elements instead of by a sample.

        >>> import tempfile, torch, elementgrad as eg
        >>> path = tempfile.mkdtemp() + "/patch.safetensors"
        >>> model = torch.nn.Linear(3, 2)
        >>> elements = eg.trainable(model, "weight[0, 1]")
        >>> elements.save(path)
        >>> eg.inspect(path)
        place         elements  shape  dtype    largest change
        weight[0, 1]  1         2x3    float32  0
        """
        patch = patch_of(self, full)
        self._trainer.on_rank_zero(lambda: patch.write(path))

    @with_cleanup
    def undo(self) -> None:
        """Restore the original values of the elements, to the bit; a second call does nothing.

        >>> import torch, elementgrad as eg
        >>> model = torch.nn.Linear(3, 2)
        >>> before = model.weight.clone()
        >>> elements = eg.trainable(model, "weight[0, :]")
        >>> with torch.no_grad():
        ...     _ = elements["weight[0, :]"].fill_(7.0)
        >>> elements.undo()
        >>> torch.equal(model.weight, before)
        True
        """
        if self._undone:
            return  # the values that are there now are not these elements'
        self._trainer.sync(self._groups)
        self._require_unchanged("undo")
        for history, own in self._histories():
            overlap = history.find_later([group.change for group in own])
            if overlap is not None:
                change, later = overlap
                raise PatchError(f"{later.place} was changed after {change.place} and is over it; undo that one first")
        defer(self._undo, self._groups)  # runs to its end even if an interrupt comes

    def _undo(self, groups: Sequence[ElementGroup]) -> None:
        for group in groups:
            if not self._training and not group.change.undone:
                group.change.values = BitArray(*self._trainer.read_bits(group.leaf))
            self._trainer.restore(group)
        self._trainer.sync(groups)
        if not self._training:
            self._forget_changes(groups)
            for group in groups:
                group.change.undone = True

    @with_rollback
    def redo(self) -> None:
        """Write the values of a patch that was undone into the model again; does nothing if they are there.

        Raises:
            PatchError: The elements have other values than when it was undone.

        >>> import torch, elementgrad as eg
        >>> model = torch.nn.Linear(3, 2)
        >>> other = {name: tensor + 1 for name, tensor in model.state_dict().items()}
        >>> applied = eg.apply(model, eg.diff(model, other))
        >>> applied.undo()
        >>> applied.redo()
        >>> eg.diff(model, other).size
        0
        """
        groups = [group for group in self._groups if group.change.undone and group.change.values is not None]
        for group in groups:
            if not np.array_equal(self._trainer.read_bits(group.tensor, group.positions)[1], group.change.bits):
                raise PatchError(f"{group.change.place} was written to in the meantime; apply the patch again")
        for group in groups:
            target = ResolvedPlace(group.place, group.name, group.tensor, group.shape, group.positions)
            again = self._trainer.make_group(target, None, group.change.values)
            defer(self._undo, [group])
            group.leaf = again.leaf
            self._trainer.write_to_parameter(group)
            group.change.undone = False
            if not isinstance(self._trainer, FunctionalTrainer):
                self._trainer.history(group.tensor).add(group.change)

    def __enter__(self) -> "Elements":
        if self._training:
            raise PlaceError("these elements train; `with` is for patches of eg.apply, and release ends training")
        return self

    def __exit__(self, *error: object) -> None:
        self.undo()

    @with_cleanup
    def release(self, *, keep: bool = True) -> None:
        """Stop training; the model is a plain model again.

        Args:
            keep: Keep the values that the elements have now; otherwise put those back that they had before.

        >>> import torch, elementgrad as eg
        >>> model = torch.nn.Linear(3, 2)
        >>> elements = eg.trainable(model, "weight[0, 1]")
        >>> elements.release()
        >>> [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        ['weight', 'bias']
        """
        self._require_supported("release")
        if not keep:
            self.undo()
        if self._training:
            defer(self._stop, keep)  # runs to its end even if an interrupt comes

    def _stop(self, keep: bool) -> None:
        self._trainer.stop(self._groups)
        for group in self._groups:
            group.change.written = self._trainer.read_bits(group.tensor, group.positions)[1]
        if not keep:
            self._forget_changes(self._groups)
        for group in self._groups:
            group.change.undone = not keep
        self._training = False

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)  # a copy, with a model of its own whose tensors have no history yet
        self.__dict__.pop("_group_at", None)
        for history, own in self._histories():
            for group in own if not self._undone else []:
                history.add(group.change)

    def _rows(self) -> Rows:
        rows = [("place", "elements", "shape", "dtype")]
        for group in self._groups:
            shape = "x".join(map(str, group.shape)) or "()"
            dtype = self._trainer.dtype_name(group.leaf)
            rows.append((shorten(place_label(group.place)), str(len(group.positions)), shape, dtype))
        return rows

    def _find(self, place: Place | str) -> ElementGroup:
        (target,) = resolve(self._trainer, [place])
        group = self._group_at.get((id(target.tensor), int(target.positions[0])))
        if group is not None and np.array_equal(group.positions, target.positions):
            return group
        raise PlaceError(f"{target.place} is not one of these places: {listed([str(place) for place in self.places])}")

    @cached_property
    def _group_at(self) -> dict[tuple[int, int], ElementGroup]:
        """The group that begins with an element, by parameter and position; no two of them share an element."""
        return {(id(group.tensor), int(group.positions[0])): group for group in self._groups}

    def _histories(self) -> list[tuple[TensorHistory, list[ElementGroup]]]:
        """Return the history of each parameter, with its groups."""
        return [(self._trainer.history(own[0].tensor), own) for own in groups_by_tensor(self._groups)]

    def _forget_changes(self, groups: Sequence[ElementGroup]) -> None:
        for own in groups_by_tensor(groups):
            self._trainer.history(own[0].tensor).remove_all([group.change for group in own])

    def _by_place(self, tensors: Sequence[Tensor]) -> Values:
        return {str(group.place): tensor for group, tensor in zip(self._groups, tensors, strict=True)}

    def _check_values(self, trainer: FunctionalTrainer, values: Mapping[str, Tensor] | None) -> list[Tensor]:
        """Return one vector for each place, of the right dtype and shape."""
        if values is None:
            return [trainer.copy_value(group) for group in self._groups]
        if not isinstance(values, Mapping):
            raise FrameworkError(f"values are a dict such as elements.values has, and this is {type(values).__name__}")
        texts = [str(group.place) for group in self._groups]
        for text in values:
            if text not in texts:
                raise PlaceError(f"{text!r} is not one of these places; {nearest(str(text), texts)}")
        missing = [text for text in texts if text not in values]
        if missing:
            raise PlaceError(f"values has nothing for {listed(missing)}; give all that elements.values has")
        return [trainer.check_value(group, values[str(group.place)], str(group.place)) for group in self._groups]

    def _unconnected_error(
        self,
        trainer: FunctionalTrainer,
        place: Place,
        name: str,
        loss_fn: LossFn,
        values: Sequence[Tensor],
        params: Any,
    ) -> ElementgradError:
        merged, _ = trainer.merge(self._groups, values, params)
        return unconnected_error(place, name, reason=explain_unconnected(loss_fn, merged, name))

    def _record_merge(self, arrays: Mapping[int, Tensor]) -> None:
        """Give merged arrays the history of the parameters and this change, so that other patches still fit them."""
        for own in groups_by_tensor([self._groups[number] for number in arrays]):
            array = arrays[self._groups.index(own[0])]
            history = self._trainer.history(array)
            known = set(map(id, history.changes()))
            earlier = [each for each in self._trainer.history(own[0].tensor).changes() if id(each) not in known]
            written = [self._trainer.read_bits(array, group.positions)[1] for group in own]
            changes = [
                ElementChange(change.place, change.positions, change.bits, bits, change.where, change.batch)
                for change, bits in zip([group.change for group in own], written, strict=True)
            ]
            for change in earlier + changes:
                history.add(change)

    def _require(self, method: str) -> None:
        self._require_supported(method)
        self._require_training()

    def _require_supported(self, method: str) -> None:
        if method in self._trainer.alternatives:
            raise FrameworkError(f"elements of this model have no {method}; use {self._trainer.alternatives[method]}")

    def _require_training(self) -> None:
        if not self._training:
            raise PlaceError("these elements do not train; give their places or their patch to eg.trainable")

    def _functional(self, method: str, instead: str) -> FunctionalTrainer:
        if not isinstance(self._trainer, FunctionalTrainer):
            raise FrameworkError(f"{method} is for parameters that are never written to, as in jax; here {instead}")
        return self._trainer

    def _require_unchanged(self, verb: str) -> None:
        """Raise a `PatchError` if the elements were overwritten since, so that there is nothing to save or undo."""
        if isinstance(self._trainer, FunctionalTrainer):
            return
        for history, own in self._histories():
            known = set(map(id, history.changes()))
            for group in [group for group in own if id(group.change) not in known]:
                # After model.half() and the like the bytes differ, and the originals can still be put back.
                converted = self._trainer.dtype_name(group.originals) != self._trainer.dtype_name(group.tensor)
                if not (converted and verb == "undo"):
                    raise PatchError(f"{group.place} was written over or taken back since; there is nothing to {verb}")


def patch_of(elements: Elements, full: bool = False) -> Patch:
    """Return the patch that `elements.save` writes."""
    trainer, groups = elements._trainer, elements._groups
    trainer.sync(groups)
    elements._require_unchanged("save")
    return Patch(tuple([_entry(trainer, group, full) for group in groups]))


def _entry(trainer: Trainer, group: ElementGroup, full: bool) -> Entry:
    dtype = trainer.dtype_name(group.originals)
    history = trainer.history(group.tensor)
    read = trainer.byte_reader(group.tensor)
    name = trainer.stable_name(group.name)
    return Entry(
        place=Place(None, name, group.place.index, None, pointwise=group.place.pointwise),
        name=name,
        shape=group.shape,
        dtype=dtype,
        indices=group.positions,
        values=BitArray(*trainer.read_bits(group.leaf)),
        originals=BitArray(dtype, history.bytes_before(group.positions)),
        fingerprint=fingerprint(group.shape, dtype, read, history.originals(), full),
        tied=tuple(
            trainer.stable_name(other)
            for other, tensor in trainer.named_parameters()
            if tensor is group.tensor and trainer.stable_name(other) != name
        ),
    )
