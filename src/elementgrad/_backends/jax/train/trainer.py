"""A user's program run with patched arrays, each operation on them in the cheapest way that is exact.

A loss as a function of the values of elements, and its gradient for these alone.

Training elements of a pytree of arrays, such as parameters in dicts or a module of flax NNX or Equinox.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from elementgrad._backends.jax import sharding
from elementgrad._backends.jax._compat import dce_jaxpr
from elementgrad._backends.jax.names import JaxModel, copy_with
from elementgrad._backends.jax.program import FOLLOWED, bind, evaluate, follow, is_array
from elementgrad._backends.jax.sharding import put, settled
from elementgrad._backends.jax.train.rules import MOVES, PatchedArray, correlation, gathered, product, sliced, split
from elementgrad._names import pytree
from elementgrad._place import grammar
from elementgrad._train.backend import TrainBackend
from elementgrad._train.numbers import cast_array
from elementgrad._train.trainer import ElementGroup, FunctionalTrainer, ParameterUse, ResolvedPlace
from elementgrad.errors import DtypeError, FrameworkError, OptionError, PatchError, PlaceError

Array = jax.Array
Tell = Callable[[str, str, bool], None]
"""Hears of every use of a parameter: its name, the operation, whether the parameter was made whole for it."""
SPARSE: dict[str, Callable[[Any, Sequence[Any]], list[Array] | None]] = {
    "gather": gathered,
    "dynamic_slice": sliced,
    "dot_general": product,
    "conv_general_dilated": correlation,
}
"""Operations that need no whole array; None where the one at hand does."""
REMAT = ("remat2", "checkpoint")


def run(jaxpr: Any, consts: Sequence[Any], operands: Sequence[Any], tell: Tell) -> list[Array]:
    """The results of a program, plain arrays all of them."""
    results = evaluate(jaxpr, consts, operands, _PatchedEquation(tell))
    return [_whole(result, "return", tell) for result in results]


class _PatchedEquation:
    """One equation: as it stands, unless a patched array is among its operands."""

    def __init__(self, tell: Tell):
        self._tell = tell

    def __call__(self, equation: Any, operands: list[Any]) -> Sequence[Any]:
        patched = [operand for operand in operands if isinstance(operand, PatchedArray)]
        if not patched:
            return bind(equation, operands)
        with equation.ctx.manager:  # the mesh among others, whose axes may be typed in another way in here
            return self._on_patched(equation, operands, patched)

    def _on_patched(self, equation: Any, operands: list[Any], patched: Sequence[PatchedArray]) -> Sequence[Any]:
        name = equation.primitive.name
        if name in REMAT:
            return self._recomputed(equation, operands)
        if name in FOLLOWED:
            return follow(equation, operands, self)
        if name in LOOPS:
            return LOOPS[name](self, equation, operands)
        if name == "split":
            return split(patched[0], equation.params, bind(equation, [patched[0].array]))
        if name in MOVES:
            (array,) = bind(equation, [_array(operand) for operand in operands])
            moved = MOVES[name](patched[0], equation.params, array) if _floating(array) else None
            if moved is not None:
                return [moved]
        results = SPARSE[name](equation, operands) if name in SPARSE else None
        if results is not None:
            for operand in patched:
                self._tell(operand.name, name, False)
            return results
        return bind(equation, [_whole(operand, name, self._tell) for operand in operands])

    def _recomputed(self, equation: Any, operands: list[Any]) -> Sequence[Any]:
        """A checkpoint stays one: what it computes is computed again for the gradient."""
        params = equation.params

        def inner(*operands: Any) -> list[Array]:
            return run(params["jaxpr"], (), operands, self._tell)

        return jax.checkpoint(inner, prevent_cse=params["prevent_cse"], policy=params["policy"])(*operands)

    def _scanned(self, equation: Any, operands: list[Any]) -> Sequence[Any]:
        """A scan whose body closes over patched arrays; what it scans over, or carries, is whole."""
        params = equation.params
        body, fixed, carried = params["jaxpr"], params["num_consts"], params["num_carry"]
        consts = operands[:fixed]
        rest = [_whole(operand, "scan", self._tell) for operand in operands[fixed:]]

        def step(carry: Any, slices: Any) -> Any:
            results = run(body.jaxpr, body.consts, [*consts, *carry, *slices], self._tell)
            return tuple(results[:carried]), tuple(results[carried:])

        start = [jnp.asarray(x, aval.dtype) for x, aval in zip(rest, body.in_avals[fixed:], strict=False)]
        carry, stacked = jax.lax.scan(
            step,
            tuple(start[:carried]),
            tuple(rest[carried:]),
            length=params["length"],
            reverse=params["reverse"],
            unroll=params["unroll"],
        )
        return [*carry, *stacked]

    def _branched(self, equation: Any, operands: list[Any]) -> Sequence[Any]:
        """A cond or switch, on whose branches patched arrays come as they are."""
        which, *others = operands

        def branch(closed: Any) -> Callable[..., list[Array]]:
            return lambda *operands: run(closed.jaxpr, closed.consts, operands, self._tell)

        return jax.lax.switch(which, [branch(closed) for closed in equation.params["branches"]], *others)


LOOPS: dict[str, Any] = {"scan": _PatchedEquation._scanned, "cond": _PatchedEquation._branched}


def _whole(operand: Any, operation: str, tell: Tell) -> Any:
    if not isinstance(operand, PatchedArray):
        return operand
    tell(operand.name, operation, True)
    return operand.whole()


def _array(operand: Any) -> Any:
    return operand.array if isinstance(operand, PatchedArray) else operand


def _floating(array: Array) -> bool:
    return bool(jnp.issubdtype(array.dtype, jnp.inexact))


ARRAYS = (jax.Array, jax.core.Tracer, np.ndarray, np.generic)
UNTRACEABLE = (jax.errors.JAXTypeError, jax.errors.JAXIndexError)
"""What a function raises that branches on values, and can be differentiated by running it as it stands alone."""


class TracedLoss:
    """A function of some arrays, which it is traced for once and then given as patched ones.

    `homes` says for each row of values which of the arrays it is of.
    """

    def __init__(
        self,
        call: Callable[..., Any],
        arrays: Sequence[Array],
        homes: Sequence[int],
        patched: Callable[[Sequence[Array]], list[PatchedArray]],
        has_aux: bool,
    ):
        self._call, self._patched, self._has_aux = call, patched, has_aux
        self._arrays, self._homes = arrays, homes
        self._structure: Any = None
        self._others: dict[int, Any] = {}
        self._program: Any = None
        with suppress(*UNTRACEABLE):
            self._program = jax.make_jaxpr(self._outputs)(*arrays)

    def gradient(self, values: Sequence[Array], wanted: Sequence[int]) -> tuple[Any, list[Array | None]]:
        """What the function returns, and its gradient for some of the values; None where no path leads to them."""

        def total(some: list[Array]) -> tuple[Array, list[Array]]:
            every = list(values)
            for number, value in zip(wanted, some, strict=True):
                every[number] = value
            loss, *aux = self._run(self._patched(every), lambda *use: None)
            return loss, aux

        loss, back, aux = jax.vjp(total, [values[number] for number in wanted], has_aux=True)
        one = jnp.ones_like(loss)
        (found,) = back(one)
        program = jax.make_jaxpr(back)(one).jaxpr
        paths = [dce_jaxpr(program, [n == number for n in range(len(found))])[1][0] for number in range(len(found))]
        if not all(paths) and self._program is not None:  # elements may be left out of what goes on of their array
            paths = [self._reached[self._homes[number]] for number in wanted]
        return self._returned([loss, *aux]), [each if path else None for each, path in zip(found, paths, strict=True)]

    @cached_property
    def _reached(self) -> list[bool]:
        """Whether the derivative of the loss is computed from that of each array."""
        program, arrays = self._program, self._arrays

        def loss(*arrays: Array) -> Array:
            return jax.core.eval_jaxpr(program.jaxpr, program.consts, *arrays)[0]

        tangents = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays]
        moved = jax.make_jaxpr(lambda *tangents: jax.jvp(loss, tuple(arrays), tangents)[1])(*tangents)
        return list(dce_jaxpr(moved.jaxpr, [True])[1])

    def uses(self, values: Sequence[Array]) -> list[ParameterUse]:
        """Every use of the arrays, without computing anything."""
        found: list[ParameterUse] = []
        if self._program is None:
            return [ParameterUse(one.name, "the function branches on values", True) for one in self._patched(values)]
        jax.eval_shape(
            lambda values: self._run(self._patched(values), lambda *use: found.append(ParameterUse(*use))), values
        )
        return list(dict.fromkeys(found))

    def _run(self, arrays: list[PatchedArray], tell: Tell) -> list[Array]:
        if self._program is None:
            return self._outputs(*[array.whole() for array in arrays])
        return run(self._program.jaxpr, self._program.consts, arrays, tell)

    def _outputs(self, *arrays: Array) -> list[Array]:
        returned = self._call(*arrays)
        if self._has_aux and not (isinstance(returned, tuple) and len(returned) == 2):
            raise FrameworkError("with has_aux=True the function returns a pair, (loss, aux)")
        loss = returned[0] if self._has_aux else returned
        if not is_array(loss):
            raise FrameworkError(f"the loss is {type(loss).__name__}; return an array of one number")
        if jnp.shape(loss):
            raise OptionError(f"the loss has shape {jnp.shape(loss)}; return one number, such as loss.mean()")
        if not jnp.issubdtype(jnp.result_type(loss), jnp.floating):
            raise OptionError(f"the loss is {jnp.result_type(loss)}; return a real number")
        leaves, self._structure = jax.tree_util.tree_flatten(returned)
        self._others = {number: leaf for number, leaf in enumerate(leaves) if not isinstance(leaf, ARRAYS)}
        return [jnp.asarray(leaf) for leaf in leaves if isinstance(leaf, ARRAYS)]

    def _returned(self, arrays: Sequence[Array]) -> Any:
        """What the function returned, with these arrays in it; whatever else there was is as it was."""
        left = iter(arrays)
        count = len(arrays) + len(self._others)
        leaves = [self._others[number] if number in self._others else next(left) for number in range(count)]
        return jax.tree_util.tree_unflatten(self._structure, leaves)


class PytreeLeaf:
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


class JaxElementGroup(ElementGroup):
    """The elements of one place. Nothing is ever written to: the values change, and are merged when asked for."""

    tensor: PytreeLeaf

    def __init__(self, target: ResolvedPlace, leaf: Array, originals: Array):
        super().__init__(target, leaf, originals, originals)
        self.largest = _largest(originals) if self.tensor.finite else np.inf


class JaxTrainer(FunctionalTrainer):
    """A pytree whose elements train."""

    def __init__(self, params: Any):
        if is_array(params):
            raise FrameworkError("an array has no name to call its elements by; give a dict, such as {'w': array}")
        self._params = params
        self._leaves: dict[str, list[PytreeLeaf]] = {}
        self._others: dict[str, str] = {}
        for name, kind, array in JaxModel(params).named_tensors():
            if kind == "parameter":
                self._leaves.setdefault(name, []).append(PytreeLeaf(name, array))
            else:
                self._others[name] = kind

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
        if name in self._others:
            raise PlaceError(
                f"{name!r} is a {self._others[name]} and only parameters train; {grammar.nearest('', names)}"
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
        found = [leaf.name for leaves in self._leaves.values() for leaf in leaves if leaf.array is tensor]
        if len(found) == 1:
            return found[0]
        if found:
            raise PlaceError(f"the array is {grammar.listed(found)}; name the one that is meant")
        raise self.not_a_parameter_error(tensor)

    def check_parameter(self, tensor: PytreeLeaf, name: str) -> None:
        if not jnp.issubdtype(tensor.dtype, jnp.inexact):
            raise DtypeError(f"{name} is {tensor.dtype}, and only floats train")

    def parse_dtype(self, dtype: Any) -> Any:
        if dtype is None:
            return None
        try:
            found = jnp.dtype(dtype)
        except TypeError:
            found = jnp.dtype(bool)
        if not jnp.issubdtype(found, jnp.inexact):
            raise OptionError(f"dtype={dtype!r} is no floating dtype; give jnp.float32 or jnp.float64, or None")
        if jax.dtypes.canonicalize_dtype(found) != found:
            raise OptionError(f'dtype={dtype!r} needs 64 bits; jax.config.update("jax_enable_x64", True) allows them')
        return found

    def make_group(
        self, target: ResolvedPlace, dtype: Any, values: Any = None, originals: Any = None
    ) -> JaxElementGroup:
        tensor = target.tensor
        if isinstance(tensor.array, jax.core.Tracer):
            raise FrameworkError(
                f"{tensor.name} is being traced; call this outside of jax.jit, and in there give elements.grad and "
                "elements.merge the traced parameters as params="
            )
        held = sharding.read(tensor.array, target.positions)
        now = held if values is None else _of_bits(values)
        kept = dtype or (_master(tensor.dtype) if values is None else now.dtype)
        if jax.dtypes.canonicalize_dtype(kept) != kept:
            raise PatchError(
                f"the patch keeps values of {tensor.name} in {kept}; give dtype=jnp.float32, or allow 64 bits by "
                'jax.config.update("jax_enable_x64", True)'
            )
        rows = [sharding.given_to_all(numbers, tensor.array) for numbers in (cast_array(now, kept), held)]
        return JaxElementGroup(target, *rows)

    def restore(self, group: Any) -> None:
        group.leaf = _cast(group.originals, group.leaf.dtype, group.tensor.array)

    def read_bits(self, tensor: Any, positions: np.ndarray | None = None) -> tuple[str, np.ndarray]:
        array = tensor.array if isinstance(tensor, PytreeLeaf) else tensor
        values = sharding.read(array, np.arange(array.size) if positions is None else positions)
        return array.dtype.name, np.frombuffer(values.tobytes(), np.uint8).reshape(-1, array.dtype.itemsize)

    def history_key(self, tensor: Any) -> Array:
        return tensor.array if isinstance(tensor, PytreeLeaf) else tensor

    def new_leaf(self, group: Any, value: Array, place: str) -> Array:
        if value.dtype != group.leaf.dtype:
            raise OptionError(f"the value for {place} is {value.dtype} and would be rounded; give {group.leaf.dtype}")
        if isinstance(value, jax.core.Tracer):
            raise FrameworkError(
                f"the value for {place} is being traced; return it from the jitted function and assign it outside"
            )
        return sharding.copied(value, group.tensor.array)

    def copy_value(self, group: Any) -> Array:
        return jnp.array(group.leaf)  # a copy, which may be donated

    def check_value(self, group: Any, value: Any, place: str) -> Array:
        if not is_array(value) and not isinstance(value, np.ndarray):
            raise FrameworkError(f"the value for {place} is {type(value).__name__}; give an array of jax")
        if value.shape != group.leaf.shape or not jnp.issubdtype(value.dtype, jnp.inexact):
            raise OptionError(
                f"the value for {place} is {value.dtype} of shape {tuple(value.shape)}; "
                f"give {group.leaf.dtype} of shape {tuple(group.leaf.shape)}, as elements.values has"
            )
        here = not isinstance(value, jax.core.Tracer | jax.Array)  # as from a file
        return sharding.given_to_all(np.asarray(value), group.tensor.array) if here else value

    def merge(self, groups: Sequence[Any], values: Sequence[Array], params: Any) -> tuple[Any, dict[int, Array]]:
        params, arrays = self._given(groups, params)
        new = dict(arrays)
        for group, value in zip(groups, values, strict=True):
            array = new[group.tensor.name]
            new[group.tensor.name] = put(array, group.positions, _cast(value, array.dtype, group.tensor.array))
        made = {number: new[group.tensor.name] for number, group in enumerate(groups)}
        return copied(params, new), {
            number: array for number, array in made.items() if not isinstance(array, jax.core.Tracer)
        }

    def value_and_grad(
        self,
        loss: Callable[[Any], Any],
        groups: Sequence[Any],
        values: Sequence[Array],
        params: Any,
        wanted: Sequence[int],
        has_aux: bool,
    ) -> tuple[Any, list[Array | None]]:
        returned, found = self._loss(loss, groups, params, has_aux).gradient(values, wanted)
        every = zip(wanted, found, strict=True)
        return returned, [None if each is None else settled(each, groups[number].leaf) for number, each in every]

    @property
    def is_distributed(self) -> bool:
        return bool(self._shared)

    @property
    def is_rank_zero(self) -> bool:
        return sharding.first(self._shared[0])

    def allgather(self, row: np.ndarray) -> np.ndarray:
        return sharding.gathered(self._shared[0], row)

    @property
    def _shared(self) -> list[Array]:
        """The parameters that are on devices of several processes."""
        arrays = [leaf.array for leaves in self._leaves.values() for leaf in leaves]
        return [each for each in arrays if not isinstance(each, jax.core.Tracer) and not each.is_fully_addressable]

    def zeros_like(self, value: Array) -> Array:
        return jnp.zeros_like(value)

    def add_gradient(self, total: Array, gradient: Array, elements: np.ndarray) -> Array:
        return total.at[elements].add(gradient[elements], mode="promise_in_bounds", unique_indices=True)

    def parameter_uses(
        self, loss: Callable[[Any], Any], groups: Sequence[Any], values: Sequence[Array]
    ) -> list[ParameterUse]:
        return self._loss(loss, groups, None, False).uses(values)

    def _loss(self, loss: Callable[[Any], Any], groups: Sequence[Any], params: Any, has_aux: bool) -> TracedLoss:
        self.check_function(loss, grammar.listed([group.tensor.name for group in groups]))
        params, arrays = self._given(groups, params)

        def patched(values: Sequence[Array]) -> list[PatchedArray]:
            return [self._patched(name, array, groups, values) for name, array in arrays.items()]

        def call(*new: Array) -> Any:
            return loss(copy_with(params, dict(zip(arrays, new, strict=True))))

        homes = [list(arrays).index(group.tensor.name) for group in groups]
        return TracedLoss(call, list(arrays.values()), homes, patched, has_aux)

    def _patched(self, name: str, array: Array, groups: Sequence[Any], values: Sequence[Array]) -> PatchedArray:
        mine = [(group, value) for group, value in zip(groups, values, strict=True) if group.tensor.name == name]
        positions = np.concatenate([group.positions for group, _ in mine])
        together = jnp.concatenate([value.astype(array.dtype) for _, value in mine])
        if array is mine[0][0].tensor.array or isinstance(array, jax.core.Tracer):
            largest = float(np.max([group.largest for group, _ in mine]))
        else:
            largest = _largest(sharding.read(array, positions)) if _finite(array) else np.inf
        return PatchedArray(array, together, positions, name, largest)

    def _given(self, groups: Sequence[Any], params: Any) -> tuple[Any, dict[str, Array]]:
        """The parameters to patch: those that were given at first, or others of the same names and shapes."""
        names = dict.fromkeys(group.tensor.name for group in groups)
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
    return sharding.given_to_all(cast_array(np.asarray(values), dtype), like)


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


class JaxTrain(TrainBackend):
    def trainer(self, model: Any) -> JaxTrainer:
        return JaxTrainer(model)


implementation = JaxTrain()
