"""`eg.watch` on JAX: call a training step, and look at all that it returns.

Arrays are never written to, so that the arguments of a call are all that it takes to run it again; buffers that a step
donates are copied before. The derivatives and the optimizer's update are part of the step, and of its record: the
search for the first bad number needs no backward.
"""

import re
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from elementgrad._backends.jax.autodiff import plain_errors
from elementgrad._backends.jax.explain import merge_calls
from elementgrad._backends.jax.explain_rules import NUMBERS, is_differentiable
from elementgrad._backends.jax.trace import JaxOpRecorder, value_of
from elementgrad._cleanup import with_cleanup
from elementgrad._names import pytree
from elementgrad._names.arguments import BoundArguments
from elementgrad._place.grammar import nearest
from elementgrad._watch.backend import (
    CapturedStep,
    Hit,
    NamedValue,
    ReplayedRun,
    StepRecord,
    WatchBackend,
    Watcher,
    WatchOptions,
)
from elementgrad._watch.elements import find_nonfinite, largest_element, positions_of
from elementgrad.errors import FrameworkError, OptionError, PlaceError

Array = Any
TRANSFORMED = re.compile(r"\b\w+\(([^()]*)\)")
"""A transformation around a name, as in `transpose(jvp(Dense_0))`."""


class JaxWatcher(Watcher):
    """Watches a step that is a function of state and batch."""

    def __init__(self, step: Callable[..., Any], optimizer: Any, options: WatchOptions):
        if optimizer is not None:
            raise OptionError("a step of JAX has its optimizer inside; call eg.watch(step) without one")
        if options.loss is not None:
            raise OptionError("a step of JAX has its loss inside, which is followed anyway; leave loss= out")
        self._step, self._options = step, options
        self._count = 0
        self._donated: dict[Any, list[bool]] = {}
        self._copies_all = False

    def start(self) -> None:
        raise FrameworkError("a step of JAX is watched by calling it, as in step = eg.watch(step); leave the with out")

    def call(self, *args: Any, **kwargs: Any) -> Any:
        leaves, tree = jax.tree.flatten((args, kwargs))
        if any(isinstance(x, jax.core.Tracer) for x in leaves):
            raise FrameworkError(
                "the watched step is being traced; compile the step itself, as in eg.watch(jax.jit(step))"
            )
        kept = self._keep(args, kwargs, leaves)
        result = self._step(*args, **kwargs)
        if not any(isinstance(x, jax.Array) for x in (*leaves, *jax.tree.leaves(result))):
            raise FrameworkError("the watched step neither takes nor returns a jax.Array; give a step of JAX")
        gone = [x for x in kept if isinstance(x, jax.Array) and x.is_deleted()]
        self._copies_all = self._copies_all or bool(gone)  # donated by a function inside of the step
        self._look(jax.tree.unflatten(tree, kept), result, bool(gone))
        self._count += 1
        return result

    def _keep(self, args: Any, kwargs: Any, leaves: list[Any]) -> list[Any]:
        """Return the arguments, with copies of those that the step donates."""
        donated = self._donations(args, kwargs, leaves)
        pairs = zip(leaves, donated, strict=True)
        return [jnp.array(x, copy=True) if is_donated and isinstance(x, jax.Array) else x for x, is_donated in pairs]

    def _donations(self, args: Any, kwargs: Any, leaves: list[Any]) -> list[bool]:
        if self._copies_all or not hasattr(self._step, "lower"):
            return [self._copies_all] * len(leaves)
        key = tuple([(getattr(x, "shape", None), str(getattr(x, "dtype", type(x)))) for x in leaves])
        if key not in self._donated:
            described = getattr(self._step.lower(*args, **kwargs), "args_info", None)
            if described is None:  # a wrapper of another library, which does not say what it donates
                self._copies_all = True
                return [True] * len(leaves)
            info = jax.tree.leaves(described, is_leaf=lambda x: hasattr(x, "donated"))
            flags = [bool(getattr(x, "donated", False)) for x in info]
            # Static arguments are no leaves there: then all is copied if anything is donated.
            self._donated[key] = flags if len(flags) == len(leaves) else [any(flags)] * len(leaves)
        return self._donated[key]

    @with_cleanup
    def _look(self, arguments: Any, result: Any, gone: bool) -> None:
        named = float_leaves(result, "output")
        arrays = [x for _, x in named]
        if arrays and not all_finite(arrays):
            record, captured = partial(record_step, self._step, arguments), partial(self._capture, arguments, result)
            self._stop(Hit(str(find_nonfinite(named, NUMBERS)), self._count, 0, record, captured), gone)
        for text, (place, rule) in self._options.rules.items():
            values = dict(named) | _new_state(self._step, arguments, result)
            x = values.get(str(place.name))
            if x is None:
                raise PlaceError(f"no array is named {place.name!r}; {nearest(str(place.name), list(values))}")
            picked = jnp.asarray(x).reshape(-1)[positions_of(place, tuple(x.shape))] if place.index else x
            if rule(picked):
                where, value = largest_element(str(place.name), place, NUMBERS.array(x))
                captured = partial(self._capture, arguments, result)
                tripped = f"{text} is such that its rule is true"
                self._stop(Hit(tripped, self._count, captured=captured, cause="rule", place=where, value=value), gone)

    def _stop(self, hit: Hit, gone: bool) -> None:
        if gone:
            evidence = ["the step donated its arguments to a function inside of it, so that it cannot run again"]
            hit = Hit(hit.tripped, hit.step, evidence=evidence)
        self._options.stop(hit)

    def _capture(self, arguments: Any, result: Any) -> CapturedStep:
        results = {f"output:{n}": x for n, (_, x) in enumerate(float_leaves(result, "output"))}
        return CapturedStep(describe(self._step), arguments, {}, results=results, settings={"jax": jax.__version__})


def record_step(step: Callable[..., Any], arguments: Any) -> StepRecord:
    """Run a step on its numbers, with every operation recorded."""
    args, kwargs = arguments
    recorder = JaxOpRecorder()
    traced: dict[int, Any] = {}

    def start(x: Any) -> Any:
        if not isinstance(x, (jax.Array, np.ndarray)) or jnp.issubdtype(x.dtype, jax.dtypes.extended):
            return x
        array = jnp.array(x, copy=True) if _is_pmapped(step) else jnp.asarray(x)  # it may donate what it gets
        return traced.setdefault(id(x), recorder.trace_source(array))

    with plain_errors(), recorder.record_thread():
        inner = _without_donation(step)
        result = inner(*jax.tree.map(start, args), **jax.tree.map(start, kwargs))
        outputs = pytree.named_leaves(result, "output")
        ids = [(name, recorder.value_id(x), value_of(x)) for name, x in outputs if _is_array(value_of(x))]
    named = [NamedValue(name, "output", value, x) for name, value, x in ids if is_differentiable(x)]
    ops = merge_calls(recorder.ops, [value for _, value, _ in ids])
    for op in ops:
        op.module = _plain_name(op.module)
    held = []
    for name, kind, x in _named_arguments(step, args, kwargs):
        value = traced.get(id(x))
        if value is not None and is_differentiable(value.value):
            held.append(NamedValue(name, kind, value.value_id, value.value))
    held.sort(key=lambda value: value.kind)  # inputs before parameters
    everything = frozenset([value for op in ops for value in (*op.inputs, *op.outputs)])
    updates = frozenset([value for op in ops if op.updates for value in op.outputs])
    return StepRecord("jax", ops, everything, NUMBERS, held, named, updates=updates)


def _plain_name(stack: str) -> str:
    while TRANSFORMED.search(stack):
        stack = TRANSFORMED.sub(r"\1", stack)
    return ".".join([part for part in stack.split(".") if part])


def _without_donation(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function inside of a jitted step, which donates nothing.

    That inside of `pmap` needs its axis, and cannot be called alone.
    """
    return getattr(step, "__wrapped__", step) if hasattr(step, "lower") and not _is_pmapped(step) else step


def _is_pmapped(step: Any) -> bool:
    return isinstance(step, _pmapped_type()) and hasattr(step, "lower")


@cache
def _pmapped_type() -> type:
    """Return the type that `pmap` returns, which is a plain function in newer versions."""
    return type(jax.pmap(lambda x: x))


def _named_arguments(step: Any, args: Any, kwargs: Any) -> list[tuple[str, str, Any]]:
    """Return name, kind and value of each leaf: the first argument is the state, and the others are its inputs."""
    arguments = BoundArguments.of(step, args, kwargs).arguments
    kinds = ["parameter", *["input"] * len(arguments)] if len(arguments) > 1 else ["input"]
    pairs = zip(arguments.items(), kinds, strict=False)
    return [(leaf, kind, x) for (name, value), kind in pairs for leaf, x in pytree.named_leaves(value, name)]


def _new_state(step: Any, arguments: Any, result: Any) -> dict[str, Any]:
    """Return the new state under the names of the old one, if the step returns it alone or first."""
    arguments = BoundArguments.of(step, *arguments).arguments
    name, old = next(iter(arguments.items()), ("", None))
    for new in (result, result[0] if isinstance(result, (tuple, list)) and len(result) else None):
        if new is not None and bool(jax.tree.structure(new) == jax.tree.structure(old)):  # type: ignore[operator]
            return dict(float_leaves(new, name))
    return {}


def float_leaves(tree: Any, name: str) -> list[tuple[str, Any]]:
    leaves = pytree.named_leaves(tree, name)
    return [(path, x) for path, x in leaves if _is_array(x) and is_differentiable(x)]


def _is_array(x: Any) -> bool:
    return isinstance(x, (jax.Array, np.ndarray, np.generic))


@jax.jit
def _are_finite(arrays: list[Array]) -> Array:
    return jnp.stack([jnp.isfinite(x).all() for x in arrays]).all()


def all_finite(arrays: list[Array]) -> bool:
    try:
        return bool(_are_finite(arrays))
    except ValueError:  # they are on several devices
        return all(bool(jnp.isfinite(x).all()) for x in arrays)


def describe(step: Any) -> dict[str, Any]:
    function = _without_donation(step)
    return {"the step": getattr(function, "__qualname__", type(function).__qualname__).rpartition("<locals>.")[2]}


class JaxWatch(WatchBackend):
    """Watches and replays steps of JAX."""

    name = "jax"

    def watcher(self, model: Any, optimizer: Any, options: WatchOptions) -> Watcher:
        return JaxWatcher(model, optimizer, options)

    def describe(self, model: Any) -> Mapping[str, Any]:
        return describe(model)

    def to_bytes(self, x: Any) -> tuple[str, tuple[int, ...], np.ndarray, Mapping[str, Any]]:
        if not _is_array(x):
            raise TypeError(type(x).__name__)
        properties: dict[str, Any] = {}
        if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            properties["key"] = str(jax.random.key_impl(x))
            x = jax.random.key_data(x)
        elif getattr(x, "weak_type", False):
            properties["weak"] = True
        array = np.asarray(x)
        return array.dtype.name, array.shape, np.frombuffer(array.tobytes(), np.uint8), properties

    def from_bytes(
        self, dtype: str, shape: tuple[int, ...], content: np.ndarray, properties: Mapping[str, Any]
    ) -> Array:
        array = np.frombuffer(content.tobytes(), jnp.dtype(dtype)).reshape(shape)
        if properties.get("key"):
            return jax.random.wrap_key_data(jnp.asarray(array), impl=str(properties["key"]))
        return jnp.asarray(array.item()) if properties.get("weak") and not shape else jnp.asarray(array)

    def run(self, model: Any, captured: CapturedStep, loss: Callable[..., Any] | None) -> ReplayedRun:
        args, kwargs = captured.arguments
        copied = jax.tree.map(lambda x: jnp.array(x, copy=True) if isinstance(x, jax.Array) else x, (args, kwargs))
        result = model(*copied[0], **copied[1])
        results = {f"output:{n}": x for n, (_, x) in enumerate(float_leaves(result, "output"))}
        return ReplayedRun(results, partial(record_step, model, (args, kwargs)))


implementation = JaxWatch()
