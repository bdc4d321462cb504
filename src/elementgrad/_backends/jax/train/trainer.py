"""The trainer of a pytree of arrays, such as parameters in dicts or a module of flax NNX or Equinox.

A loss becomes a function of the values of elements (`TracedLoss`): its program runs with patched arrays in place of
parameters.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from elementgrad._backends.jax import sharding
from elementgrad._backends.jax._compat import dce_jaxpr, jaxprs_in_params, scan_sizes
from elementgrad._backends.jax.names import JaxModel, copy_with
from elementgrad._backends.jax.program import FOLLOWED, bind, bind_cached, evaluate, follow, is_array
from elementgrad._backends.jax.sharding import constrain_like, put
from elementgrad._backends.jax.train.products import convolve, multiply
from elementgrad._backends.jax.train.rules import MOVES, PatchedArray, dynamic_slice, gather, split
from elementgrad._names import pytree
from elementgrad._place import grammar
from elementgrad._train.bits import array_bits, cast_array
from elementgrad._train.trainer import ElementGroup, FunctionalTrainer, ParameterUse, ResolvedPlace, TrainBackend
from elementgrad.errors import DtypeError, FrameworkError, OptionError, PatchError, PlaceError

Array = jax.Array
OnUse = Callable[[str, str, bool], None]
"""Called for every use of a parameter: its name, the operation, whether the parameter was made whole for it."""
SPARSE: dict[str, Callable[[Any, Sequence[Any]], list[Array] | None]] = {
    "gather": gather,
    "dynamic_slice": dynamic_slice,
    "dot_general": multiply,
    "conv_general_dilated": convolve,
}
"""Operations that need no whole array; they return None for an equation that does."""
CALLS = {*FOLLOWED, "custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"}
REMAT = ("remat2", "checkpoint")
ARRAYS = (jax.Array, jax.core.Tracer, np.ndarray, np.generic)
UNTRACEABLE = (jax.errors.JAXTypeError, jax.errors.JAXIndexError)
"""Raised by a function that branches on values, which can be differentiated only by running it."""


class TracedLoss:
    """A function of some arrays, traced once and then run with patched arrays.

    Args:
        call: The function.
        patched: Its arguments: arrays with the elements that train, whose values are vectors.
        has_aux: The function returns a pair of the loss and anything else.
    """

    def __init__(self, call: Callable[..., Any], patched: Sequence[PatchedArray], has_aux: bool):
        self._call, self._patched, self._has_aux = call, patched, has_aux
        self._arrays = [each.array for each in patched]
        self._structure: Any = None
        self._constants: dict[int, Any] = {}
        """Leaves of what the function returns that are no arrays, by their number."""
        self._program: Any = None
        with suppress(*UNTRACEABLE):
            self._program = jax.make_jaxpr(self._flat_call)(*self._arrays)

    def gradient(self, wanted: Sequence[int]) -> tuple[Any, list[Array | None]]:
        """Return what the function returns, and its gradients for the vectors of some arrays, by their numbers.

        A gradient is None where the function does not depend on the array.
        """
        reached: set[int] = set()

        def total(vectors: list[Array]) -> tuple[Array, list[Array]]:
            patched = list(self._patched)
            for number, vector in zip(wanted, _note_gradients(vectors, wanted, reached), strict=True):
                patched[number] = patched[number].with_values(vector)
            loss, *aux = self._run(patched, lambda *use: None)
            return loss, aux

        loss, vjp, aux = jax.vjp(total, [self._patched[number].values for number in wanted], has_aux=True)
        one = jnp.ones_like(loss)
        (gradients,) = vjp(one)
        if self._program is None or _has_loops(self._program.jaxpr):
            # The derivative of a loop has zeros in the place of gradients that there are none of.
            program, count = jax.make_jaxpr(vjp)(one).jaxpr, len(wanted)
            paths = [dce_jaxpr(program, [n == number for n in range(count)])[1][0] for number in range(count)]
        else:
            paths = [number in reached for number in wanted]
        if not all(paths) and self._program is not None:
            # The loss may depend on an array and not on the elements of it that are wanted, as after a slice.
            paths = [self._reached_arrays[number] for number in wanted]
        gradients = [gradient if path else None for gradient, path in zip(gradients, paths, strict=True)]
        return self._unflatten([loss, *aux]), gradients

    def uses(self) -> list[ParameterUse]:
        """Return every use of the arrays, without computing anything."""
        if self._program is None:
            return [ParameterUse(one.name, "the function branches on values", True) for one in self._patched]
        uses: list[ParameterUse] = []

        def run(vectors: list[Array]) -> list[Array]:
            patched = [each.with_values(vector) for each, vector in zip(self._patched, vectors, strict=True)]
            return self._run(patched, lambda *use: uses.append(ParameterUse(*use)))

        jax.eval_shape(run, [each.values for each in self._patched])
        return list(dict.fromkeys(uses))

    @cached_property
    def _reached_arrays(self) -> list[bool]:
        """For each array, True if the derivative of the loss is computed from it."""
        program, arrays = self._program, self._arrays

        def loss(*arrays: Array) -> Array:
            return jax.core.eval_jaxpr(program.jaxpr, program.consts, *arrays)[0]

        tangents = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays]
        jvp = jax.make_jaxpr(lambda *tangents: jax.jvp(loss, tuple(arrays), tangents)[1])(*tangents)
        return list(dce_jaxpr(jvp.jaxpr, [True])[1])

    def _run(self, arrays: Sequence[PatchedArray], on_use: OnUse) -> list[Array]:
        if self._program is None:
            return self._flat_call(*[array.whole() for array in arrays])
        return run(self._program.jaxpr, self._program.consts, arrays, on_use)

    def _flat_call(self, *arrays: Array) -> list[Array]:
        """Call the function, check its loss, and return all arrays in what it returns, the loss first."""
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
        self._constants = {number: leaf for number, leaf in enumerate(leaves) if not isinstance(leaf, ARRAYS)}
        return [jnp.asarray(leaf) for leaf in leaves if isinstance(leaf, ARRAYS)]

    def _unflatten(self, arrays: Sequence[Array]) -> Any:
        """Return what the function returned, with these arrays in it."""
        left = iter(arrays)
        count = len(arrays) + len(self._constants)
        leaves = [self._constants[number] if number in self._constants else next(left) for number in range(count)]
        return jax.tree_util.tree_unflatten(self._structure, leaves)


def _note_gradients(vectors: list[Array], numbers: Sequence[int], reached: set[int]) -> list[Array]:
    """Return vectors, and add the number of each that is given a gradient, be it zero, to those reached."""

    @jax.custom_vjp
    def identity(vectors: list[Array]) -> list[Array]:
        return vectors

    def backward(_: None, gradients: Any) -> tuple[Any]:
        given = [None if isinstance(gradient, SymbolicZero) else gradient for gradient in gradients]
        reached.update(number for number, gradient in zip(numbers, given, strict=True) if gradient is not None)
        return (given,)

    identity.defvjp(lambda vectors: ([vector.value for vector in vectors], None), backward, symbolic_zeros=True)
    return identity(vectors)


def _has_loops(jaxpr: Any) -> bool:
    """Return True if a program has programs in it other than calls."""
    return any(
        equation.primitive.name not in CALLS or any(map(_has_loops, inner))
        for equation in jaxpr.eqns
        if (inner := list(jaxprs_in_params(equation.params)))
    )


def run(jaxpr: Any, consts: Sequence[Any], operands: Sequence[Any], on_use: OnUse) -> list[Array]:
    """Run a program with patched arrays among its operands; its results are plain arrays."""
    results = evaluate(jaxpr, consts, operands, _PatchedInterpreter(on_use))
    return [_make_whole(result, "return", on_use) for result in results]


class _PatchedInterpreter:
    """Evaluates one equation: as it stands, unless a patched array is among its operands."""

    def __init__(self, on_use: OnUse):
        self._on_use = on_use

    def __call__(self, equation: Any, operands: list[Any]) -> Sequence[Any]:
        patched = [operand for operand in operands if isinstance(operand, PatchedArray)]
        if not patched:
            return bind_cached(equation, operands)
        with equation.ctx.manager:  # the mesh among others, whose axes may be typed in another way in here
            return self._evaluate(equation, operands, patched)

    def _evaluate(self, equation: Any, operands: list[Any], patched: Sequence[PatchedArray]) -> Sequence[Any]:
        name = equation.primitive.name
        if name in REMAT:
            return self._checkpoint(equation, operands)
        if name in FOLLOWED:
            return follow(equation, operands, self)
        if name == "scan":
            return self._scan(equation, operands)
        if name == "cond":
            return self._cond(equation, operands)
        if name == "split":
            return split(patched[0], equation.params, bind(equation, [patched[0].array]))
        if name in MOVES:
            plain = [operand.array if isinstance(operand, PatchedArray) else operand for operand in operands]
            (array,) = bind(equation, plain)
            is_floating = jnp.issubdtype(array.dtype, jnp.inexact)
            moved = MOVES[name](patched[0], equation.params, array) if is_floating else None
            if moved is not None:
                return [moved]
        results = SPARSE[name](equation, operands) if name in SPARSE else None
        if results is not None:
            for operand in patched:
                self._on_use(operand.name, name, False)
            return results
        return bind(equation, [_make_whole(operand, name, self._on_use) for operand in operands])

    def _checkpoint(self, equation: Any, operands: list[Any]) -> Sequence[Any]:
        """Keep a checkpoint one: what it computes is computed again for the gradient."""
        params = equation.params

        def body(*operands: Any) -> list[Array]:
            return run(params["jaxpr"], (), operands, self._on_use)

        return jax.checkpoint(body, prevent_cse=params["prevent_cse"], policy=params["policy"])(*operands)

    def _scan(self, equation: Any, operands: list[Any]) -> Sequence[Any]:
        """Let the body of a scan close over patched arrays; what it scans over, or carries, is made whole."""
        params = equation.params
        body, (fixed, carried) = params["jaxpr"], scan_sizes(params)
        consts = operands[:fixed]
        rest = [_make_whole(operand, "scan", self._on_use) for operand in operands[fixed:]]

        def step(carry: Any, slices: Any) -> Any:
            results = run(body.jaxpr, body.consts, [*consts, *carry, *slices], self._on_use)
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

    def _cond(self, equation: Any, operands: list[Any]) -> Sequence[Any]:
        """Pass patched arrays into the branches of a cond or switch."""
        which, *others = operands

        def branch(closed: Any) -> Callable[..., list[Array]]:
            return lambda *operands: run(closed.jaxpr, closed.consts, operands, self._on_use)

        return jax.lax.switch(which, [branch(closed) for closed in equation.params["branches"]], *others)


def _make_whole(operand: Any, operation: str, on_use: OnUse) -> Any:
    if not isinstance(operand, PatchedArray):
        return operand
    on_use(operand.name, operation, True)
    return operand.whole()


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
        self._model = JaxModel(params)
        for name, kind, array in self._model.named_tensors():
            if kind == "parameter":
                self._leaves.setdefault(name, []).append(PytreeLeaf(name, array))
            else:
                self._other_kinds[name] = kind

    def names(self) -> Iterator[str]:
        return iter(self._leaves)

    def named_parameters(self) -> Iterator[tuple[str, PytreeLeaf]]:
        return ((leaf.name, leaf) for leaves in self._leaves.values() for leaf in leaves)

    def aliases(self) -> Mapping[str, str]:
        return self._aliases

    @cached_property
    def _aliases(self) -> Mapping[str, str]:
        return self._model.aliases()

    def stable_name(self, name: str) -> str:
        return name if name in self._leaves else self._aliases.get(name, name)

    def parameter(self, name: str) -> PytreeLeaf:
        first_name = self.stable_name(name)
        leaves = self._leaves.get(first_name, [])
        if len(leaves) == 1:
            return leaves[0]
        names = list(self._leaves)
        if leaves:
            raise PlaceError(f"{name!r} names {len(leaves)} arrays; rename one of them")
        if first_name in self._other_kinds:
            raise PlaceError(
                f"{name!r} is a {self._other_kinds[first_name]} and only parameters train; {grammar.nearest('', names)}"
            )
        inside = [other for other in (*names, *self._aliases) if other.startswith(f"{name}.")]
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
        for name, numbers in _numbers_by_name(groups).items():
            array, like = arrays[name], groups[numbers[0]].tensor.array
            new = _join([_cast(values[number], array.dtype, like) for number in numbers], array.dtype)
            arrays[name] = put(array, np.concatenate([groups[number].positions for number in numbers]), new)
        merged = {number: arrays[group.tensor.name] for number, group in enumerate(groups)}
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
        params, leaves = self._leaves_of(groups, params)
        patched = [
            _patch(leaves[name], [groups[number] for number in numbers], [values[number] for number in numbers])
            for name, numbers in _numbers_by_name(groups).items()
        ]

        def call(*new: Array) -> Any:
            return loss(copy_with(params, dict(zip(leaves, new, strict=True))))

        return TracedLoss(call, patched, has_aux)

    def _leaves_of(self, groups: Sequence[Any], params: Any) -> tuple[Any, dict[str, PytreeLeaf]]:
        """Return the parameters, or others of the same names and shapes, and the leaves of groups in them."""
        names = dict.fromkeys(group.tensor.name for group in groups)
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


def _numbers_by_name(groups: Sequence[Any]) -> dict[str, list[int]]:
    """Return for each parameter the numbers of its groups."""
    numbers: dict[str, list[int]] = {}
    for number, group in enumerate(groups):
        numbers.setdefault(group.tensor.name, []).append(number)
    return numbers


def _patch(leaf: PytreeLeaf, groups: Sequence[Any], values: Sequence[Array]) -> PatchedArray:
    positions = np.concatenate([group.positions for group in groups])
    return PatchedArray(leaf.array, _join(values, leaf.dtype), positions, leaf.name, leaf.largest)


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
    parts: Any = np.split(np.asarray(vector), ends) if is_here else jnp.split(vector, ends)
    pairs = zip(parts, [value.dtype for value in like], strict=True)
    parts = [part if part.dtype == dtype else part.astype(dtype) for part, dtype in pairs]
    return jax.device_put(parts) if is_here else parts


def _is_here(value: Array) -> bool:
    return not isinstance(value, jax.core.Tracer) and len(value.sharding.device_set) == 1


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
        return array_bits(tensor)

    def from_bits(self, bits: np.ndarray, like: Array) -> Array:
        return jax.device_put(np.frombuffer(bits.tobytes(), like.dtype).reshape(like.shape), like.sharding)


implementation = JaxTrain()
