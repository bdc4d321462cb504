"""The trainer of a pytree of arrays, such as parameters in dicts or a module of flax NNX or Equinox."""

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from elementgrad._backends.jax import sharding
from elementgrad._backends.jax.names import JaxModel, copy_with
from elementgrad._backends.jax.program import is_array
from elementgrad._backends.jax.sharding import constrain_like, put
from elementgrad._backends.jax.train.loss import TracedLoss
from elementgrad._backends.jax.train.rules import PatchedArray
from elementgrad._names import pytree
from elementgrad._place import grammar
from elementgrad._train.numbers import cast_array
from elementgrad._train.trainer import ElementGroup, FunctionalTrainer, ParameterUse, ResolvedPlace, TrainBackend
from elementgrad.errors import DtypeError, FrameworkError, OptionError, PatchError, PlaceError

Array = jax.Array


class PytreeLeaf:
    """One array of a pytree by its name: two names of one array are two parameters."""

    def __init__(self, name: str, array: Array):
        self.name = name
        self.array = array
        self.shape = tuple(array.shape)
        self.dtype = array.dtype

    @cached_property
    def is_finite(self) -> bool:
        """True if all of it is: a product without some rows multiplies them by zero, and zero times inf is NaN."""
        return _is_finite(self.array)


class JaxElementGroup(ElementGroup):
    """The elements of one place."""

    tensor: PytreeLeaf

    def __init__(self, target: ResolvedPlace, leaf: Array, originals: Array):
        super().__init__(target, leaf, originals, originals)
        self.largest = _largest_abs(originals) if self.tensor.is_finite else np.inf


class JaxTrainer(FunctionalTrainer):
    """A pytree whose elements train."""

    def __init__(self, params: Any):
        if is_array(params):
            raise FrameworkError("an array has no name to call its elements by; give a dict, such as {'w': array}")
        self._params = params
        self._leaves: dict[str, list[PytreeLeaf]] = {}
        self._other_kinds: dict[str, str] = {}
        for name, kind, array in JaxModel(params).named_tensors():
            if kind == "parameter":
                self._leaves.setdefault(name, []).append(PytreeLeaf(name, array))
            else:
                self._other_kinds[name] = kind

    def names(self) -> Iterator[str]:
        return iter(self._leaves)

    def named_parameters(self) -> Iterator[tuple[str, PytreeLeaf]]:
        return ((leaf.name, leaf) for leaves in self._leaves.values() for leaf in leaves)

    def parameter(self, name: str) -> PytreeLeaf:
        leaves = self._leaves.get(name, [])
        if len(leaves) == 1:
            return leaves[0]
        names = list(self._leaves)
        if leaves:
            raise PlaceError(f"{name!r} names {len(leaves)} arrays; rename one of them")
        if name in self._other_kinds:
            raise PlaceError(
                f"{name!r} is a {self._other_kinds[name]} and only parameters train; {grammar.nearest('', names)}"
            )
        inside = [other for other in names if other.startswith(f"{name}.")]
        if inside:
            raise PlaceError(f"{name!r} is no array; it has {grammar.listed(inside)}")
        if any(
            path == f".{name}" and isinstance(leaf, np.ndarray) for path, leaf in pytree.named_leaves(self._params, "")
        ):
            raise FrameworkError(f"{name!r} is a NumPy array, which carries no gradients; give jnp.asarray({name})")
        raise PlaceError(f"no parameter named {name!r}; {grammar.nearest(name, names)}")

    def name_of(self, tensor: Any) -> str:
        names = [name for name, leaf in self.named_parameters() if leaf.array is tensor]
        if len(names) == 1:
            return names[0]
        if names:
            raise PlaceError(f"the array is {grammar.listed(names)}; name the one that is meant")
        raise self.not_a_parameter_error(tensor)

    def check_parameter(self, tensor: PytreeLeaf, name: str) -> None:
        if not jnp.issubdtype(tensor.dtype, jnp.inexact):
            raise DtypeError(f"{name} is {tensor.dtype}, and only floats train")

    def read_bits(self, tensor: Any, positions: np.ndarray | None = None) -> tuple[str, np.ndarray]:
        array = self.history_key(tensor)
        values = sharding.read(array, np.arange(array.size) if positions is None else positions)
        return array.dtype.name, np.frombuffer(values.tobytes(), np.uint8).reshape(-1, array.dtype.itemsize)

    def history_key(self, tensor: Any) -> Array:
        return tensor.array if isinstance(tensor, PytreeLeaf) else tensor

    def parse_dtype(self, dtype: Any) -> Any:
        if dtype is None:
            return None
        try:
            parsed = jnp.dtype(dtype)
        except TypeError:
            parsed = jnp.dtype(bool)
        if not jnp.issubdtype(parsed, jnp.inexact):
            raise OptionError(f"dtype={dtype!r} is no floating dtype; give jnp.float32 or jnp.float64, or None")
        if jax.dtypes.canonicalize_dtype(parsed) != parsed:
            raise OptionError(f'dtype={dtype!r} needs 64 bits; jax.config.update("jax_enable_x64", True) allows them')
        return parsed

    def make_group(
        self, target: ResolvedPlace, dtype: Any, values: Any = None, originals: Any = None
    ) -> JaxElementGroup:
        tensor = target.tensor
        if isinstance(tensor.array, jax.core.Tracer):
            raise FrameworkError(
                f"{tensor.name} is being traced; call this outside of jax.jit, and in there give elements.grad and "
                "elements.merge the traced parameters as params="
            )
        initial = sharding.read(tensor.array, target.positions)
        now = initial if values is None else np.frombuffer(values.bits.tobytes(), jnp.dtype(values.dtype))
        if dtype is None and values is None:  # half precision is too coarse for small steps
            dtype = jnp.dtype(jnp.float32) if tensor.dtype.itemsize < 4 else tensor.dtype
        dtype = dtype or now.dtype
        if jax.dtypes.canonicalize_dtype(dtype) != dtype:
            raise PatchError(
                f"the patch keeps values of {tensor.name} in {dtype}; give dtype=jnp.float32, or allow 64 bits by "
                'jax.config.update("jax_enable_x64", True)'
            )
        leaf, before = [sharding.replicate(row, tensor.array) for row in (cast_array(now, dtype), initial)]
        return JaxElementGroup(target, leaf, before)

    def restore(self, group: Any) -> None:
        group.leaf = _cast(group.originals, group.leaf.dtype, group.tensor.array)

    def copy_value(self, group: Any) -> Array:
        return jnp.array(group.leaf)

    def check_value(self, group: Any, value: Any, place: str) -> Array:
        if not is_array(value) and not isinstance(value, np.ndarray):
            raise FrameworkError(f"the value for {place} is {type(value).__name__}; give an array of jax")
        if value.shape != group.leaf.shape or not jnp.issubdtype(value.dtype, jnp.inexact):
            raise OptionError(
                f"the value for {place} is {value.dtype} of shape {tuple(value.shape)}; "
                f"give {group.leaf.dtype} of shape {tuple(group.leaf.shape)}, as elements.values has"
            )
        on_host = not isinstance(value, jax.core.Tracer | jax.Array)  # as from a file
        return sharding.replicate(np.asarray(value), group.tensor.array) if on_host else value

    def new_leaf(self, group: Any, value: Array, place: str) -> Array:
        if value.dtype != group.leaf.dtype:
            raise OptionError(f"the value for {place} is {value.dtype} and would be rounded; give {group.leaf.dtype}")
        if isinstance(value, jax.core.Tracer):
            raise FrameworkError(
                f"the value for {place} is being traced; return it from the jitted function and assign it outside"
            )
        return sharding.copy_replicated(value, group.tensor.array)

    def merge(self, groups: Sequence[Any], values: Sequence[Array], params: Any) -> tuple[Any, dict[int, Array]]:
        params, arrays = self._arrays_of(groups, params)
        for name, numbers in _numbers_by_name(groups).items():
            array, like = arrays[name], groups[numbers[0]].tensor.array
            new = _join([_cast(values[number], array.dtype, like) for number in numbers], array.dtype)
            arrays[name] = put(array, np.concatenate([groups[number].positions for number in numbers]), new)
        merged = {number: arrays[group.name] for number, group in enumerate(groups)}
        untraced = {number: array for number, array in merged.items() if not isinstance(array, jax.core.Tracer)}
        return copy_with(params, arrays), untraced

    def value_and_grad(
        self,
        loss: Callable[[Any], Any],
        groups: Sequence[Any],
        values: Sequence[Array],
        params: Any,
        wanted: Sequence[int],
        has_aux: bool,
    ) -> tuple[Any, list[Array | None]]:
        traced = self._trace(loss, groups, values, params, has_aux)
        numbers, chosen = list(_numbers_by_name(groups).values()), set(wanted)
        arrays = [array for array, own in enumerate(numbers) if not chosen.isdisjoint(own)]
        returned, gradients = traced.gradient(arrays)
        each: dict[int, Array | None] = {}
        for array, gradient in zip(arrays, gradients, strict=True):
            own = numbers[array]
            each |= zip(own, _split(gradient, [values[number] for number in own]), strict=True)
        return returned, [
            None if (gradient := each[number]) is None else constrain_like(gradient, groups[number].leaf)
            for number in wanted
        ]

    def zeros_like(self, value: Array) -> Array:
        return jnp.zeros_like(value)

    def add_gradient(self, total: Array, gradient: Array, elements: np.ndarray) -> Array:
        return total.at[elements].add(gradient[elements], mode="promise_in_bounds", unique_indices=True)

    def parameter_uses(
        self, loss: Callable[[Any], Any], groups: Sequence[Any], values: Sequence[Array]
    ) -> list[ParameterUse]:
        return self._trace(loss, groups, values, None, False).uses()

    @property
    def is_distributed(self) -> bool:
        return bool(self._distributed_arrays)

    @property
    def is_rank_zero(self) -> bool:
        return sharding.is_first_process(self._distributed_arrays[0])

    def allgather(self, row: np.ndarray) -> np.ndarray:
        return sharding.gather_rows(self._distributed_arrays[0], row)

    @property
    def _distributed_arrays(self) -> list[Array]:
        arrays = [leaf.array for _, leaf in self.named_parameters()]
        return [each for each in arrays if not isinstance(each, jax.core.Tracer) and not each.is_fully_addressable]

    def _trace(
        self, loss: Callable[[Any], Any], groups: Sequence[Any], values: Sequence[Array], params: Any, has_aux: bool
    ) -> TracedLoss:
        self.check_function(loss, grammar.listed(list(dict.fromkeys(group.name for group in groups))))
        params, arrays = self._arrays_of(groups, params)
        patched = [
            _patch(arrays[name], [groups[number] for number in numbers], [values[number] for number in numbers])
            for name, numbers in _numbers_by_name(groups).items()
        ]

        def call(*new: Array) -> Any:
            return loss(copy_with(params, dict(zip(arrays, new, strict=True))))

        return TracedLoss(call, patched, has_aux)

    def _arrays_of(self, groups: Sequence[Any], params: Any) -> tuple[Any, dict[str, Array]]:
        """Return the parameters, or others of the same names and shapes, and the arrays of groups in them."""
        names = dict.fromkeys(group.name for group in groups)
        if params is None:
            return self._params, {name: self._leaves[name][0].array for name in names}
        other = JaxTrainer(params)
        for name in names:
            mine, theirs = self.parameter(name), other.parameter(name)
            if (mine.shape, mine.dtype) != (theirs.shape, theirs.dtype):
                raise OptionError(
                    f"params= has {name} as {theirs.dtype} of shape {theirs.shape}, and the elements are of one that "
                    f"is {mine.dtype} of shape {mine.shape}; give the same parameters"
                )
        return params, {name: other.parameter(name).array for name in names}


def _numbers_by_name(groups: Sequence[Any]) -> dict[str, list[int]]:
    """Return for each parameter the numbers of its groups."""
    numbers: dict[str, list[int]] = {}
    for number, group in enumerate(groups):
        numbers.setdefault(group.name, []).append(number)
    return numbers


def _patch(array: Array, groups: Sequence[Any], values: Sequence[Array]) -> PatchedArray:
    positions = np.concatenate([group.positions for group in groups])
    if array is groups[0].tensor.array or isinstance(array, jax.core.Tracer):
        largest = float(np.max([group.largest for group in groups]))
    else:
        largest = _largest_abs(sharding.read(array, positions)) if _is_finite(array) else np.inf
    return PatchedArray(array, _join(values, array.dtype), positions, groups[0].name, largest)


def _join(values: Sequence[Array], dtype: Any) -> Array:
    """Return vectors as one. Many of them are joined on the host, as a program for them is slow to compile."""
    if len(values) == 1:
        return values[0].astype(dtype)
    if all(map(_is_here, values)):
        return jnp.asarray(np.concatenate([np.asarray(value) for value in values])).astype(dtype)
    return jax.lax.concatenate([value if value.dtype == dtype else value.astype(dtype) for value in values], 0)


def _split(vector: Array | None, like: Sequence[Array]) -> Sequence[Array | None]:
    """Return the parts of a vector that other vectors were joined to, in their dtypes."""
    if vector is None:
        return [None] * len(like)
    if len(like) == 1:
        return [vector.astype(like[0].dtype)]
    ends = np.cumsum([len(value) for value in like])[:-1]
    is_here = _is_here(vector)
    parts = np.split(np.asarray(vector), ends) if is_here else jnp.split(vector, ends)
    parts = [part if part.dtype == value.dtype else part.astype(value.dtype) for part, value in zip(parts, like, strict=True)]
    return jax.device_put(parts) if is_here else parts


def _is_here(value: Array) -> bool:
    return not isinstance(value, jax.core.Tracer) and len(value.sharding.device_set) == 1


def _cast(values: Array, dtype: Any, like: Array) -> Array:
    """Cast values to the bit: on the host, as compilers lose NaNs and small numbers. Traced ones are left to them."""
    if isinstance(values, jax.core.Tracer) or values.dtype == dtype:
        return values
    return sharding.replicate(cast_array(np.asarray(values), dtype), like)


def _is_finite(array: Array) -> bool:
    with jax.ensure_compile_time_eval():
        return bool(_all_finite(array))


@jax.jit
def _all_finite(array: Array) -> Array:
    return jnp.isfinite(array).all()


def _largest_abs(values: Any) -> float:
    """Return the largest absolute value; NaN if there is a NaN."""
    with np.errstate(invalid="ignore"):  # a signalling NaN
        return float(np.abs(np.asarray(values).astype(np.complex128)).max(initial=0.0))


class JaxTrain(TrainBackend):
    """Makes trainers of pytrees."""

    def trainer(self, model: Any) -> JaxTrainer:
        return JaxTrainer(model)


implementation = JaxTrain()
