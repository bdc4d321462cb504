"""Training elements of a pytree of arrays, such as parameters in dicts or a module of flax NNX or Equinox."""

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from elementgrad import text, tree
from elementgrad.backends.casting import cast_array
from elementgrad.backends.jax import meshes
from elementgrad.backends.jax.axes import put, settled
from elementgrad.backends.jax.model import JaxModel, copied
from elementgrad.backends.jax.program import is_array
from elementgrad.backends.jax.training.gradient import Loss
from elementgrad.backends.jax.training.patched import Patched
from elementgrad.backends.training import FunctionalTrainer, Part, UseOf
from elementgrad.errors import DtypeError, FrameworkError, OptionError, PatchError, PlaceError

Array = jax.Array


class Leaf:
    """One array of a pytree by its name: two names may hold one array, and are two parameters all the same."""

    def __init__(self, name: str, array: Array):
        self.name = name
        self.array = array
        self.shape = tuple(array.shape)
        self.dtype = array.dtype

    @cached_property
    def finite(self) -> bool:
        """Whether all of it is: a product without some rows multiplies them by zero, and zero times infinity is NaN."""
        return _finite(self.array)


class JaxPart(Part):
    """The elements of one place. Nothing is ever written to: the values change, and are merged when asked for."""

    tensor: Leaf

    def __init__(self, leaf: Leaf, positions: np.ndarray, values: Array, originals: Array):
        self.tensor, self.positions, self.leaf, self.originals = leaf, positions, values, originals
        self.largest = _largest(originals) if leaf.finite else np.inf


class JaxTrainer(FunctionalTrainer):
    """A pytree whose elements train."""

    def __init__(self, params: Any):
        if is_array(params):
            raise FrameworkError("an array has no name to call its elements by; give a dict, such as {'w': array}")
        self._params = params
        self._leaves: dict[str, list[Leaf]] = {}
        self._others: dict[str, str] = {}
        for name, kind, array in JaxModel(params).held():
            if kind == "parameter":
                self._leaves.setdefault(name, []).append(Leaf(name, array))
            else:
                self._others[name] = kind

    def names(self) -> Iterator[str]:
        return iter(self._leaves)

    def spelled(self) -> Iterator[tuple[str, Leaf]]:
        return ((leaf.name, leaf) for leaves in self._leaves.values() for leaf in leaves)

    def parameter(self, name: str) -> Leaf:
        leaves = self._leaves.get(name, [])
        if len(leaves) == 1:
            return leaves[0]
        names = list(self._leaves)
        if leaves:
            raise PlaceError(f"{name!r} names {len(leaves)} arrays; rename one of them")
        if name in self._others:
            raise PlaceError(f"{name!r} is a {self._others[name]} and only parameters train; {text.nearest('', names)}")
        inside = [other for other in names if other.startswith(f"{name}.")]
        if inside:
            raise PlaceError(f"{name!r} is no array; it has {text.listed(inside)}")
        if any(path == f".{name}" and isinstance(leaf, np.ndarray) for path, leaf in tree.leaves(self._params, "")):
            raise FrameworkError(f"{name!r} is a NumPy array, which carries no gradients; give jnp.asarray({name})")
        raise PlaceError(f"no parameter named {name!r}; {text.nearest(name, names)}")

    def named(self, tensor: Any) -> str:
        found = [leaf.name for leaves in self._leaves.values() for leaf in leaves if leaf.array is tensor]
        if len(found) == 1:
            return found[0]
        if found:
            raise PlaceError(f"the array is {text.listed(found)}; name the one that is meant")
        raise self.stranger(tensor)

    def check(self, tensor: Leaf, name: str) -> None:
        if not jnp.issubdtype(tensor.dtype, jnp.inexact):
            raise DtypeError(f"{name} is {tensor.dtype}, and only floats train")

    def dtype(self, given: Any) -> Any:
        if given is None:
            return None
        try:
            found = jnp.dtype(given)
        except TypeError:
            found = jnp.dtype(bool)
        if not jnp.issubdtype(found, jnp.inexact):
            raise OptionError(f"dtype={given!r} is no floating dtype; give jnp.float32 or jnp.float64, or None")
        if jax.dtypes.canonicalize_dtype(found) != found:
            raise OptionError(f'dtype={given!r} needs 64 bits; jax.config.update("jax_enable_x64", True) allows them')
        return found

    def part(
        self, tensor: Leaf, positions: np.ndarray, dtype: Any, values: Any = None, originals: Any = None
    ) -> JaxPart:
        if isinstance(tensor.array, jax.core.Tracer):
            raise FrameworkError(
                f"{tensor.name} is being traced; call this outside of jax.jit, and in there give elements.grad and "
                "elements.merge the traced parameters as params="
            )
        held = meshes.read(tensor.array, positions)
        now = held if values is None else _of_bits(values)
        kept = dtype or (_master(tensor.dtype) if values is None else now.dtype)
        if jax.dtypes.canonicalize_dtype(kept) != kept:
            raise PatchError(
                f"the patch keeps values of {tensor.name} in {kept}; give dtype=jnp.float32, or allow 64 bits by "
                'jax.config.update("jax_enable_x64", True)'
            )
        rows = [meshes.given_to_all(numbers, tensor.array) for numbers in (cast_array(now, kept), held)]
        return JaxPart(tensor, positions, *rows)

    def restore(self, part: Any) -> None:
        part.leaf = _cast(part.originals, part.leaf.dtype, part.tensor.array)

    def bits(self, tensor: Any, positions: np.ndarray | None = None) -> tuple[str, np.ndarray]:
        array = tensor.array if isinstance(tensor, Leaf) else tensor
        values = meshes.read(array, np.arange(array.size) if positions is None else positions)
        return array.dtype.name, np.frombuffer(values.tobytes(), np.uint8).reshape(-1, array.dtype.itemsize)

    def lasting(self, tensor: Leaf) -> Array:
        return tensor.array

    def keepable(self, part: Any, value: Array, place: str) -> Array:
        if value.dtype != part.leaf.dtype:
            raise OptionError(f"the value for {place} is {value.dtype} and would be rounded; give {part.leaf.dtype}")
        if isinstance(value, jax.core.Tracer):
            raise FrameworkError(
                f"the value for {place} is being traced; return it from the jitted function and assign it outside"
            )
        return meshes.copied(value, part.tensor.array)

    def value(self, part: Any) -> Array:
        return jnp.array(part.leaf)  # a copy, which may be donated

    def fitting(self, part: Any, value: Any, place: str) -> Array:
        if not is_array(value) and not isinstance(value, np.ndarray):
            raise FrameworkError(f"the value for {place} is {type(value).__name__}; give an array of jax")
        if value.shape != part.leaf.shape or not jnp.issubdtype(value.dtype, jnp.inexact):
            raise OptionError(
                f"the value for {place} is {value.dtype} of shape {tuple(value.shape)}; "
                f"give {part.leaf.dtype} of shape {tuple(part.leaf.shape)}, as elements.values has"
            )
        here = not isinstance(value, jax.core.Tracer | jax.Array)  # as from a file
        return meshes.given_to_all(np.asarray(value), part.tensor.array) if here else value

    def merged(self, parts: Sequence[Any], values: Sequence[Array], params: Any) -> tuple[Any, dict[int, Array]]:
        params, arrays = self._given(parts, params)
        new = dict(arrays)
        for part, value in zip(parts, values, strict=True):
            array = new[part.tensor.name]
            new[part.tensor.name] = put(array, part.positions, _cast(value, array.dtype, part.tensor.array))
        made = {number: new[part.tensor.name] for number, part in enumerate(parts)}
        return copied(params, new), {
            number: array for number, array in made.items() if not isinstance(array, jax.core.Tracer)
        }

    def gradient(
        self,
        loss: Callable[[Any], Any],
        parts: Sequence[Any],
        values: Sequence[Array],
        params: Any,
        wanted: Sequence[int],
        has_aux: bool,
    ) -> tuple[Any, list[Array | None]]:
        returned, found = self._loss(loss, parts, params, has_aux).gradient(values, wanted)
        every = zip(wanted, found, strict=True)
        return returned, [None if each is None else settled(each, parts[number].leaf) for number, each in every]

    @property
    def several(self) -> bool:
        return bool(self._shared)

    @property
    def first(self) -> bool:
        return meshes.first(self._shared[0])

    def gathered(self, row: np.ndarray) -> np.ndarray:
        return meshes.gathered(self._shared[0], row)

    @property
    def _shared(self) -> list[Array]:
        """The parameters that are on devices of several processes."""
        arrays = [leaf.array for leaves in self._leaves.values() for leaf in leaves]
        return [each for each in arrays if not isinstance(each, jax.core.Tracer) and not each.is_fully_addressable]

    def zeros(self, like: Array) -> Array:
        return jnp.zeros_like(like)

    def joined(self, total: Array, gradient: Array, chosen: np.ndarray) -> Array:
        return total.at[chosen].add(gradient[chosen], mode="promise_in_bounds", unique_indices=True)

    def uses(self, loss: Callable[[Any], Any], parts: Sequence[Any], values: Sequence[Array]) -> list[UseOf]:
        return self._loss(loss, parts, None, False).uses(values)

    def _loss(self, loss: Callable[[Any], Any], parts: Sequence[Any], params: Any, has_aux: bool) -> Loss:
        self.check_function(loss, text.listed([part.tensor.name for part in parts]))
        params, arrays = self._given(parts, params)

        def patched(values: Sequence[Array]) -> list[Patched]:
            return [self._patched(name, array, parts, values) for name, array in arrays.items()]

        def call(*new: Array) -> Any:
            return loss(copied(params, dict(zip(arrays, new, strict=True))))

        homes = [list(arrays).index(part.tensor.name) for part in parts]
        return Loss(call, list(arrays.values()), homes, patched, has_aux)

    def _patched(self, name: str, array: Array, parts: Sequence[Any], values: Sequence[Array]) -> Patched:
        mine = [(part, value) for part, value in zip(parts, values, strict=True) if part.tensor.name == name]
        positions = np.concatenate([part.positions for part, _ in mine])
        together = jnp.concatenate([value.astype(array.dtype) for _, value in mine])
        if array is mine[0][0].tensor.array or isinstance(array, jax.core.Tracer):
            largest = float(np.max([part.largest for part, _ in mine]))
        else:
            largest = _largest(meshes.read(array, positions)) if _finite(array) else np.inf
        return Patched(array, together, positions, name, largest)

    def _given(self, parts: Sequence[Any], params: Any) -> tuple[Any, dict[str, Array]]:
        """The parameters to patch: those that were given at first, or others of the same names and shapes."""
        names = dict.fromkeys(part.tensor.name for part in parts)
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


def _master(dtype: Any) -> Any:
    """What values are kept in: half precision is too coarse for small steps."""
    return jnp.dtype(jnp.float32) if dtype.itemsize < 4 else dtype


def _cast(values: Array, dtype: Any, like: Array) -> Array:
    """Cast values to the bit: on the host, as compilers lose NaNs and small numbers. Traced ones are left to them."""
    if isinstance(values, jax.core.Tracer) or values.dtype == dtype:
        return values
    return meshes.given_to_all(cast_array(np.asarray(values), dtype), like)


def _of_bits(numbers: Any) -> np.ndarray:
    return np.frombuffer(numbers.bits.tobytes(), jnp.dtype(numbers.dtype))


def _finite(array: Array) -> bool:
    with jax.ensure_compile_time_eval():
        return bool(_all_finite(array))


@jax.jit
def _all_finite(array: Array) -> Array:
    return jnp.isfinite(array).all()


def _largest(numbers: Any) -> float:
    """The size of the largest of some numbers; NaN if one of them is NaN."""
    with np.errstate(invalid="ignore"):  # a signalling NaN
        return float(np.abs(np.asarray(numbers).astype(np.complex128)).max(initial=0.0))
