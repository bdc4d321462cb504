"""The trainer of a pytree of arrays, such as parameters in dicts or a module of flax NNX or Equinox."""

import math
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
from elementgrad._train.backend import TrainBackend
from elementgrad._train.numbers import cast_array
from elementgrad._train.trainer import ElementGroup, FunctionalTrainer, ParameterUse, ResolvedPlace
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
    def largest(self) -> float:
        """The largest absolute value; NaN if there is one, or if the array is traced."""
        if isinstance(self.array, jax.core.Tracer):
            return math.nan
        with jax.ensure_compile_time_eval():
            return float(_largest_abs(self.array))


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
            raise PlaceError(f"the array is {grammar.listed(names)}; name one of them")
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
            raise OptionError(f"dtype={dtype!r} is not a floating dtype; give jnp.float32 or jnp.float64, or None")
        if jax.dtypes.canonicalize_dtype(parsed) != parsed:
            raise OptionError(f'dtype={dtype!r} needs 64 bits; jax.config.update("jax_enable_x64", True) allows them')
        return parsed

    def make_group(self, target: ResolvedPlace, dtype: Any, values: Any = None, originals: Any = None) -> ElementGroup:
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
        return ElementGroup(target, leaf, before, before)

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
        params, leaves = self._leaves_of(groups, params)
        arrays = {name: leaf.array for name, leaf in leaves.items()}
        for group, value in zip(groups, values, strict=True):
            array = arrays[group.name]
            arrays[group.name] = put(array, group.positions, _cast(value, array.dtype, group.tensor.array))
        new = {number: arrays[group.name] for number, group in enumerate(groups)}
        untraced = {number: array for number, array in new.items() if not isinstance(array, jax.core.Tracer)}
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
        returned, gradients = self._trace(loss, groups, params, has_aux).gradient(values, wanted)
        every = zip(wanted, gradients, strict=True)
        return returned, [None if each is None else constrain_like(each, groups[number].leaf) for number, each in every]

    def zeros_like(self, value: Array) -> Array:
        return jnp.zeros_like(value)

    def add_gradient(self, total: Array, gradient: Array, elements: np.ndarray) -> Array:
        return total.at[elements].add(gradient[elements], mode="promise_in_bounds", unique_indices=True)

    def parameter_uses(
        self, loss: Callable[[Any], Any], groups: Sequence[Any], values: Sequence[Array]
    ) -> list[ParameterUse]:
        return self._trace(loss, groups, None, False).uses(values)

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

    def _trace(self, loss: Callable[[Any], Any], groups: Sequence[Any], params: Any, has_aux: bool) -> TracedLoss:
        self.check_function(loss, grammar.listed([group.name for group in groups]))
        params, leaves = self._leaves_of(groups, params)

        def patch(values: Sequence[Array]) -> list[PatchedArray]:
            return [_patch(leaf, groups, values) for leaf in leaves.values()]

        def call(*new: Array) -> Any:
            return loss(copy_with(params, dict(zip(leaves, new, strict=True))))

        array_of = [list(leaves).index(group.name) for group in groups]
        return TracedLoss(call, [leaf.array for leaf in leaves.values()], array_of, patch, has_aux)

    def _leaves_of(self, groups: Sequence[Any], params: Any) -> tuple[Any, dict[str, PytreeLeaf]]:
        """Return the parameters, or others of the same names and shapes, and the leaves of groups in them."""
        names = dict.fromkeys(group.name for group in groups)
        if params is None:
            return self._params, {name: self._leaves[name][0] for name in names}
        other = JaxTrainer(params)
        for name in names:
            mine, theirs = self.parameter(name), other.parameter(name)
            if (mine.shape, mine.dtype) != (theirs.shape, theirs.dtype):
                raise OptionError(
                    f"params= has {name} as {theirs.dtype} of shape {theirs.shape}, and the elements are of one that "
                    f"is {mine.dtype} of shape {mine.shape}; give the same parameters"
                )
        return params, {name: other.parameter(name) for name in names}


def _patch(leaf: PytreeLeaf, groups: Sequence[Any], values: Sequence[Array]) -> PatchedArray:
    own = [(group, value) for group, value in zip(groups, values, strict=True) if group.name == leaf.name]
    positions = np.concatenate([group.positions for group, _ in own])
    new = jnp.concatenate([value.astype(leaf.dtype) for _, value in own])
    return PatchedArray(leaf.array, new, positions, leaf.name, leaf.largest)


def _cast(values: Array, dtype: Any, like: Array) -> Array:
    """Cast values to the bit: on the host, as compilers lose NaNs and small numbers. Traced ones are left to them."""
    if isinstance(values, jax.core.Tracer) or values.dtype == dtype:
        return values
    return sharding.replicate(cast_array(np.asarray(values), dtype), like)


@jax.jit
def _largest_abs(array: Array) -> Array:
    # The largest of many numbers need not be NaN in XLA if one of them is.
    return jnp.where(jnp.isfinite(array).all(), jnp.max(jnp.abs(array), initial=0.0), jnp.nan)


class JaxTrain(TrainBackend):
    """Makes trainers of pytrees."""

    def trainer(self, model: Any) -> JaxTrainer:
        return JaxTrainer(model)

    def tensor_bits(self, tensor: Array) -> tuple[str, np.ndarray]:
        array = np.asarray(tensor)
        return array.dtype.name, np.frombuffer(array.tobytes(), np.uint8).reshape(array.size, array.dtype.itemsize)

    def from_bits(self, bits: np.ndarray, like: Array) -> Array:
        return jax.device_put(np.frombuffer(bits.tobytes(), like.dtype).reshape(like.shape), like.sharding)


implementation = JaxTrain()
