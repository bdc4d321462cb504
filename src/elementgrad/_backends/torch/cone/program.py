"""Records PyTorch programs without running them, and runs parts of them again.

A `LazyTensor` has a shape, a dtype and a device, and no numbers. A dispatch mode sees every operation below autograd,
after autocast and after the decomposition of composite operations, finds the shapes of its results by PyTorch's meta
kernels, and notes the operation. These are the operations of which autograd would make its graph. A cone runs them
above autograd, so that every derivative rule is PyTorch's own.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch.overrides import TorchFunctionMode

from elementgrad._backends.autodiff import TensorFunction, reason
from elementgrad._backends.source_location import is_user_code, location_text
from elementgrad._backends.torch import _compat
from elementgrad._backends.torch.autodiff import materialize
from elementgrad._backends.torch.cone import arithmetic, moves, windows  # noqa: F401 (they fill the table of rules)
from elementgrad._backends.torch.cone.calls import CustomCall, RecordedCall, flatten_call, unflatten_call
from elementgrad._backends.torch.cone.rules import DECOMPOSED, draw, find_rule, is_random, known_value
from elementgrad._backends.torch.isolate import (
    add_hook,
    enter_mode,
    is_own_hook,
    isolated,
    restore_attributes,
    without_autocast,
)
from elementgrad._backends.torch.trace_memory import version_of
from elementgrad._cleanup import assign, defer, scope
from elementgrad._cone.backend import ConeBackend, RecordedProgram
from elementgrad._cone.boxes import Box, sizes, slices, whole
from elementgrad._cone.plan import Cone, NoConeError, ProgramOp, ProgramValue, plan_need
from elementgrad.errors import ElementgradError, FrameworkError

Tensor = torch.Tensor
SHAPE_KEEPING = frozenset(
    [
        "relu",
        "hardtanh",
        "hardswish",
        "hardsigmoid",
        "gelu",
        "silu",
        "sigmoid",
        "tanh",
        "elu",
        "leaky_relu",
        "softplus",
        "exp",
        "log",
        "sqrt",
        "rsqrt",
        "neg",
        "abs",
        "sin",
        "cos",
        "mish",
    ]
)
"""Operations of one tensor whose results are like it, so that no meta kernel has to say so."""


START_SECONDS = 1e-3
"""The time that a recording takes beside its operations, roughly."""


PHYSICAL = {"_conj": torch.ops.aten.conj_physical.default, "_neg_view": torch.ops.aten.neg.default}
"""Views that only set a flag on a tensor, which no recorded tensor has: what they do to the numbers."""


WRITES_TO_CONSTANT = "the function writes to a tensor that it was given or holds"
CONSTANT_CHANGED = (
    "a tensor that this read needs was changed in place since the function was recorded, as an optimizer does; make "
    "the Jacobian anew, or write to a clone of it"
)


class AliasedWriteError(Exception):
    """An in-place write to a tensor that has views, which PyTorch's own functionalization makes plain first."""


class LazyTensor(Tensor):
    """A tensor of a program that is being recorded: it has no numbers.

    The user's code may keep one, in a cache of masks for example. Once the recording has ended, the numbers are
    computed where the tensor is used, and it is like the one that the cache would hold without us.
    """

    meta: Tensor
    value: ProgramValue
    recorder: "RecordingStatus"
    numbers: Tensor | None

    @staticmethod
    def __new__(cls, meta: Tensor, value: ProgramValue, device: Any, recorder: "RecordingStatus") -> "LazyTensor":
        lazy = _compat.make_wrapper_subclass(cls, meta, device)
        lazy.meta, lazy.value, lazy.recorder, lazy.numbers = meta, value, recorder, None
        return lazy

    def compute(self) -> Tensor:
        """Return the tensor with its numbers, always the same one."""
        if self.recorder.active:
            raise NoConeError("values leave PyTorch")
        if self.numbers is None:
            cone = plan_need(_ops_behind(self.value), self.value, whole(self.value.shape))
            self.numbers = run_cone(cone, self.value, (), grad=False)[0].detach().clone()
            self.value = ProgramValue(self.value.shape)  # which frees the program
        return self.numbers

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        if self.recorder.active:
            return f"<tensor of shape {tuple(self.shape)} that has not been computed>"
        return self.compute().__repr__(**options)

    __torch_function__ = _compat.disabled_torch_function

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        leaves, layout = flatten_call(args, kwargs or {})
        args, kwargs = unflatten_call([_with_numbers(x) for x in leaves], layout)
        return func(*args, **kwargs)


class RecordingStatus:
    """True while the recording goes on."""

    active = False


def _with_numbers(x: Any, recorder: RecordingStatus | None = None) -> Any:
    """Return a tensor with numbers in place of one that is recorded, but for those of the recorder that is given."""
    return x.compute() if isinstance(x, LazyTensor) and x.recorder is not recorder else x


def _ops_behind(value: ProgramValue) -> list[ProgramOp]:
    """Return the operations that a value comes from, in the order in which they ran."""
    ops: dict[ProgramOp, None] = {}
    ahead = [value.maker] if value.maker is not None else []
    while ahead:
        missing = [x.maker for x in ahead[-1].operands if x.maker is not None and x.maker not in ops]
        if missing:
            ahead += missing
        else:
            ops[ahead.pop()] = None
    return list(ops)


def _method_of_numbers(name: str) -> Callable[..., Any]:
    return lambda self, *args, **kwargs: getattr(self.compute(), name)(*args, **kwargs)


# These need memory or a type, and are no operations of PyTorch.
for _name in ("numpy", "tolist", "data_ptr", "untyped_storage"):
    setattr(LazyTensor, _name, _method_of_numbers(_name))
for _name in ("__array__", "__dlpack__", "__deepcopy__", "__reduce_ex__"):
    setattr(LazyTensor, _name, _method_of_numbers(_name))


LEAVING = (Tensor.numpy, Tensor.tolist, Tensor.__array__, Tensor.__dlpack__, Tensor.data_ptr, Tensor.untyped_storage)
"""Functions that give numbers or memory to something that is not PyTorch."""
DATA = (Tensor.data.__get__, Tensor.data.__set__)  # type: ignore[attr-defined]
"""Access to the numbers of a tensor apart from its gradient, of which an operation on them leaves no trace."""
HOOKS = (Tensor.register_hook, Tensor.register_post_accumulate_grad_hook, Tensor.retain_grad)


class Refusal(TorchFunctionMode):
    """Refuses what a recording cannot follow: numbers that leave PyTorch, and hooks on gradients.

    While PyTorch makes writes plain, also tensors that were written to through another tensor which has no gradient,
    such as `x.detach().mul_(2)`: autograd goes on with the gradient of x, and a plain program does not have it.
    """

    def __init__(self, recorder: "ProgramRecorder"):
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._recorder.functionalized:
            for x in _compat.tree_leaves((args, kwargs)):
                traced = isinstance(x, Tensor) and _compat.is_functional_tensor(x) and x.grad_fn is not None
                if traced and self._recorder.lacks_gradient(self._recorder.value_of(x)):
                    raise NoConeError("a tensor is written to without its gradient")
        if func in LEAVING:
            raise NoConeError("values leave PyTorch")
        if func in DATA and (isinstance(args[0], LazyTensor) or _compat.is_functional_tensor(args[0])):
            raise NoConeError("the .data of a tensor is used")
        if func in HOOKS:
            raise NoConeError("a gradient hook is registered")
        return func(*args, **(kwargs or {}))


class ProgramRecorder(_compat.PlainDispatchMode):
    """A dispatch mode that notes operations and computes only the shapes of their results."""

    def __init__(self, functionalized: bool, limit: int | None):
        super().__init__()
        self.ops: list[ProgramOp] = []
        self.custom_nodes: set[Any] = set()
        """The nodes of the graph that users' own rules made."""
        self._limit = limit
        self.automatic = limit is not None
        """True if the user did not ask for a cone."""
        self.functionalized = functionalized
        """True if PyTorch makes in-place writes plain before they are recorded."""
        self.versions: dict[ProgramValue, tuple[Tensor, int | None]] = {}
        """The tensors of constants, and how many writes each had counted; the constants count none themselves."""
        self.status = RecordingStatus()
        self._inputs: set[ProgramValue] = set()
        self._constants: dict[int, ProgramValue] = {}
        self._metas: dict[int, Tensor] = {}
        self._kept: list[Tensor] = []  # ids are only unique while the tensors live
        self._views: dict[int, list[Any]] = {}
        self._user_files: dict[str, bool] = {}

    # Values

    def make_input(self, x: Tensor) -> "LazyTensor":
        meta = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
        value = ProgramValue(tuple(x.shape), x.detach(), dtype=x.dtype, differentiable=x.is_floating_point())
        self.versions[value] = x, version_of(x)
        self._inputs.add(value)
        return LazyTensor(meta, value, x.device, self.status)

    def lacks_gradient(self, value: ProgramValue) -> bool:
        """Return True for a value of the inputs that no gradient flows through."""
        if value.differentiable:
            return False
        return any(operand in self._inputs for op in _ops_behind(value) for operand in op.operands)

    def value_of(self, x: Tensor) -> ProgramValue:
        x = _compat.from_functional(x) if self.functionalized else x
        if isinstance(x, LazyTensor):
            return x.value
        value = self._constants.get(id(x))
        if value is None:
            value = self._constants[id(x)] = ProgramValue(tuple(x.shape), x.detach(), dtype=x.dtype)
            self.versions[value] = x, version_of(x)
        return value

    def _meta_of(self, x: Tensor) -> Tensor:
        if isinstance(x, LazyTensor):
            return x.meta
        if id(x) not in self._metas:
            self._metas[id(x)] = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
            self._kept.append(x)
        return self._metas[id(x)]

    def compute(self, value: ProgramValue) -> Tensor:
        """Compute a value now, as the program needs its numbers to go on."""
        cone = plan_need(self.ops, value, whole(value.shape))
        return run_cone(cone, value, (), grad=False)[0]

    # Operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = _compat.operation_name(func)
        if name.startswith("prim::"):
            return args[0].device if "device" in name else func(*args, **kwargs)
        if name == "_local_scalar_dense":
            return self.compute(self.value_of(args[0])).item()
        if name == "is_same_size":
            return args[0].shape == args[1].shape
        if name in DECOMPOSED:
            with self:
                return DECOMPOSED[name](func)(*args, **kwargs)
        leaves, layout = flatten_call(args, kwargs)
        if any(isinstance(x, LazyTensor) and x.recorder is not self.status for x in leaves):
            # They were kept from an earlier recording, and are constants of this one.
            args, kwargs = unflatten_call([_with_numbers(x, self.status) for x in leaves], layout)
            with self:
                return func(*args, **kwargs)
        call = RecordedCall(
            PHYSICAL.get(name, func),
            [self.value_of(x) if isinstance(x, Tensor) else x for x in leaves],
            layout,
            torch.is_grad_enabled(),
        )
        written = _compat.written_arguments(func, args, kwargs)
        if is_random(func):
            self._draw(call, name)
        if written:
            self._check_write(func, name, written, call)
        if name in PHYSICAL:
            made = self._meta_of(args[0]).detach()
        else:
            made = self._find_shapes(func, name, leaves, layout, call, written)
        flat, structure = _compat.tree_flatten(made)
        op = self._note(name, call, flat)
        if written:
            self._rename(written[0], op.results[0])
            return written[0]
        device = next((x.device for x in leaves if isinstance(x, Tensor)), kwargs.get("device") or torch.device("cpu"))
        lazies = [
            y if value is None else LazyTensor(y, value, device, self.status)
            for y, value in zip(flat, op.results, strict=True)
        ]
        is_view, of_constants = _compat.returns_views(func), not any(isinstance(x, LazyTensor) for x in leaves)
        if self.functionalized and call.slots and of_constants and not is_view:
            # PyTorch leaves tensors that are made of constants alone as they are, and they could not be written to.
            lazies = [_compat.to_functional(y) if isinstance(y, LazyTensor) else y for y in lazies]
        if is_view:
            for lazy in lazies:
                if isinstance(lazy, LazyTensor):
                    self._views.setdefault(_compat.storage_key(lazy.meta), []).append(ref(lazy))
        return _compat.tree_unflatten(lazies, structure)

    def note_custom(self, apply: Callable[..., Any], args: Sequence[Any]) -> Any:
        """Call a user's own rule, and note the call in place of what it does."""
        leaves = [self.value_of(x) if isinstance(x, Tensor) else x for x in args]
        result = apply(*args)
        lazies = [y for y in _compat.tree_leaves(result) if isinstance(y, LazyTensor)]
        written = {
            slot for slot, x in enumerate(args) if isinstance(x, Tensor) and self.value_of(x) is not leaves[slot]
        }
        if any(all(args[slot] is not y for y in lazies) for slot in written):
            raise NoConeError("an autograd.Function writes to an argument that it does not return")
        call = CustomCall(apply, leaves, torch.is_grad_enabled(), written)
        op = self._note("autograd.Function", call, lazies)
        for lazy, value in zip(lazies, op.results, strict=True):
            assert value is not None
            lazy.value = value
            self.custom_nodes.add(lazy.grad_fn)
        return result

    def _note(self, name: str, call: Any, made: Sequence[Any]) -> ProgramOp:
        if name.startswith("embedding_renorm"):
            raise NoConeError("an embedding with max_norm writes to its weight")
        if self._limit is not None and len(self.ops) >= self._limit:
            raise NoConeError(f"the function has more than {self._limit} operations for its size")
        results = [ProgramValue(tuple(y.shape), dtype=y.dtype) if isinstance(y, Tensor) else None for y in made]
        operands = [call.leaves[slot] for slot in call.slots]
        differentiable = any(value.differentiable for value in operands)
        if self.functionalized and differentiable and not call.grad:
            # It may be a write without gradients, which leaves the gradient of what was there before.
            raise NoConeError("the function computes without gradients and writes to views")
        for result in results:
            if result is not None:
                result.differentiable = differentiable and call.grad and name != "detach"
        op = ProgramOp(name, operands, results, find_rule, self._location(), call)
        for result in results:
            if result is not None:
                result.maker = op
        self.ops.append(op)
        return op

    def _location(self) -> str | None:
        frame: Any = sys._getframe(3)
        while frame is not None:
            file = frame.f_code.co_filename
            if file not in self._user_files:
                self._user_files[file] = is_user_code(file, ("torch", "transformers"))
            if self._user_files[file]:
                return location_text(file, frame.f_lineno)
            frame = frame.f_back
        return None

    def _find_shapes(self, func: Any, name: str, leaves: Any, layout: Any, call: RecordedCall, written: Any) -> Any:
        """Return the results as meta tensors."""
        if _compat.shape_depends_on_values(func):
            values = [self.compute(call.leaves[slot]) for slot in call.slots]
            return _compat.tree_map_tensors(_as_meta, call(*values))
        if len(written) == 1:
            return self._meta_of(written[0])
        metas = [
            self._meta_of(x) if isinstance(x, Tensor) else torch.device("meta") if isinstance(x, torch.device) else x
            for x in leaves
        ]
        args, kwargs = unflatten_call(metas, layout)
        if not call.slots and _compat.takes_device(func):
            kwargs = {**kwargs, "device": torch.device("meta")}
        made = _known_shapes(name, args)
        return func(*args, **kwargs) if made is None else made

    # Writes in place

    def _check_write(self, func: Any, name: str, written: Sequence[Tensor], call: RecordedCall) -> None:
        target = written[0]
        if len(written) > 1 or not call.slots or call.leaves[0] is not self.value_of(target):
            raise NoConeError(f"{name} writes to several tensors")
        if isinstance(target, LazyTensor):
            # No frame may hold the views: in PyTorch 2.8, an error that keeps some of them alive and passes a recurrent
            # layer, which is written in C++, ends the process.
            memory = _compat.storage_key(target.meta)
            if any(_compat.storage_key(meta) == memory for meta in self._metas.values()):
                raise NoConeError(WRITES_TO_CONSTANT)
            views = self._views.get(memory, ())
            if _compat.changes_shape(func) or any(view() is not None for view in views):
                raise AliasedWriteError
        elif target.is_floating_point():
            raise NoConeError(WRITES_TO_CONSTANT)
        call.writes = True
        if not call.grad and target.requires_grad and not _compat.is_pointwise(func):
            raise NoConeError(f"{name} writes without gradients to a tensor that has some")

    def _draw(self, call: RecordedCall, name: str) -> None:
        """Draw random numbers as the program does, and remember from which state.

        They are drawn in full, so that the next operation that draws some finds the state that it would.
        """
        call.random_state = torch.get_rng_state()
        # The values of what is filled, or only looked at for its shape, do not matter; those of other operands do.
        first = 1 if name.endswith(("_", "_like")) else 0
        if any(known_value(call.leaves[slot]) is None for slot in call.slots[first:]):
            raise NoConeError(f"{name} draws random numbers that depend on computed values")
        if any(isinstance(leaf, torch.Generator) for leaf in call.leaves):
            raise NoConeError(f"{name} draws random numbers from its own generator")
        draw(call)

    def _rename(self, target: Tensor, value: ProgramValue | None) -> None:
        assert value is not None
        if isinstance(target, LazyTensor):
            target.value = value
        else:
            self._constants[id(target)] = value


def _as_meta(x: Tensor) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def _known_shapes(name: str, args: Any) -> Any:
    """Return results whose shapes are plain, where a meta kernel takes a millisecond; None for others."""
    if name == "convolution" and not args[6] and args[0].dim() == args[1].dim():
        x, weight, _, stride, padding, dilation = args[:6]
        space = weight.dim() - 2
        stride, padding, dilation = ([*each] * (space if len(each) == 1 else 1) for each in (stride, padding, dilation))
        out = [
            (n + 2 * p - d * (k - 1) - 1) // s + 1
            for n, k, s, p, d in zip(x.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True)
        ]
        return torch.empty([x.shape[0], weight.shape[0], *out], dtype=x.dtype, device="meta")
    if name.rstrip("_") in SHAPE_KEEPING and args[0].is_floating_point():
        x = args[0]
        return torch.empty(x.shape, dtype=x.dtype, device="meta") if x.is_contiguous() else torch.empty_like(x)
    return None


@contextmanager
def _note_custom_rules(recorder: ProgramRecorder) -> Iterator[None]:
    """Note each user's own `autograd.Function` as one operation."""

    def note(apply: Callable[..., Any], cls: Any, *args: Any, **kwargs: Any) -> Any:
        if recorder.functionalized:
            raise NoConeError("an autograd.Function is combined with writes to views")
        if kwargs or not any(isinstance(x, LazyTensor) for x in args):
            return apply(*args, **kwargs)
        if cls.__name__ == "BackwardHookFunction":
            raise NoConeError("a module has a backward hook")
        return recorder.note_custom(apply, args)

    with _compat.replace_function_apply(note):
        yield


MODULE_STATE = frozenset(vars(torch.nn.Module()))
"""The attributes of every module, which hold parameters, buffers and hooks."""


class _ModuleStates:
    """A hook before each call of a module: its attributes are restored at the end, as it may keep what is recorded."""

    def __init__(self, automatic: bool):
        self._seen: set[int] = set()
        self._automatic = automatic

    def __call__(self, module: Any, _: Any) -> None:
        if id(module) in self._seen:
            return
        hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
        if self._automatic and not all(map(is_own_hook, hooks)):
            # Such a hook often keeps what it is given, and would be left with tensors that have no numbers.
            raise NoConeError("a module has a forward hook")
        self._seen.add(id(module))
        defer(restore_attributes, module, dict(module.__dict__))
        for name, value in list(module.__dict__.items()):
            if type(value) is list:
                defer(value.__setitem__, slice(None), list(value))
            elif type(value) is dict and name not in MODULE_STATE:
                defer(_restore_dict, value, dict(value))


def _restore_dict(changed: dict[Any, Any], before: dict[Any, Any]) -> None:
    for key in changed.keys() - before.keys():
        del changed[key]
    changed.update(before)


class TorchProgram(RecordedProgram):
    """A recorded function, with its differentiated inputs and the tensors that were named in it."""

    def __init__(self, run: TensorFunction, inputs: Sequence[Tensor | None], limit: int | None = None):
        try:
            with suppress(AliasedWriteError):
                self._record(run, inputs, ProgramRecorder(False, limit))
                return
            self._record(run, inputs, ProgramRecorder(True, limit))
        except (NoConeError, ElementgradError):
            raise
        except Exception as error:  # the plain way will raise it again if it is the user's own
            raise NoConeError(reason(error)) from error

    def _record(self, run: TensorFunction, inputs: Sequence[Tensor | None], recorder: ProgramRecorder) -> None:
        sources: list[Any] = [None] * len(inputs)
        values: list[Any] = [None] * len(inputs)

        def tap(position: int, activation: Tensor) -> Tensor:
            copy = activation.clone()
            values[position] = value = recorder.value_of(copy)
            value.differentiable = True
            copy = copy if copy.requires_grad else copy.requires_grad_()
            sources[position] = copy = copy.view_as(copy)
            return copy

        with scope():
            defer(torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled())
            torch.set_autocast_cache_enabled(False)  # or it would hand what is recorded to later runs
            assign(recorder.status, "active", True)
            with isolated(run.function), _note_custom_rules(recorder), scope():
                for position, x in enumerate(inputs):
                    if x is not None:
                        lazy = recorder.make_input(x)
                        values[position] = lazy.value
                        source = _compat.to_functional(lazy) if recorder.functionalized else lazy
                        sources[position] = source.requires_grad_() if x.is_floating_point() else source
                add_hook(_compat._global_forward_pre_hooks, _ModuleStates(recorder.automatic))
                enter_mode(Refusal(recorder))
                enter_mode(recorder)
                if recorder.functionalized:
                    defer(_compat.disable_functionalization)
                    _compat.enable_functionalization()
                # The user's code may write to its arguments, which a leaf does not allow.
                arguments = [
                    partial(tap, position) if source is None else source.clone()
                    for position, source in enumerate(sources)
                ]
                outputs = list(run(*arguments))
                starts = [x if isinstance(x, Tensor) else sources[i] for i, x in enumerate(arguments)]
                self.outputs = [recorder.value_of(y) for y in outputs]
        if any(isinstance(node, _compat.PythonNode) for node in _nodes_behind(outputs) - recorder.custom_nodes):
            raise NoConeError("the apply of an autograd.Function was looked up before the function runs")
        self.ops = recorder.ops
        self.recording_seconds = START_SECONDS + TorchCone.op_seconds * len(self.ops)
        self.inputs = values
        self.tensors = outputs
        self.sources = [x if x is not None else source for x, source in zip(inputs, sources, strict=True)]
        self._ends = [None if x is None else x.grad_fn for x in starts]
        self._behind: dict[int, set[Any]] = {}
        self._versions = recorder.versions

    def is_connected(self, output: int, input: int) -> bool:
        if output not in self._behind:
            self._behind[output] = _nodes_behind([self.tensors[output]])
        end = self._ends[input]
        return end is not None and end in self._behind[output]

    def _require_unchanged(self, cone: Cone) -> None:
        """Raise an error if a tensor that a cone needs was written to: reads of it would not fit those before."""
        constants = [self._versions[value] for value in cone.needed if value in self._versions]
        if any(version_of(x) != version for x, version in constants):
            raise FrameworkError(CONSTANT_CHANGED)

    def evaluate(self, cone: Cone, of: ProgramValue) -> Tensor:
        self._require_unchanged(cone)
        return run_cone(cone, of, (), grad=False)[0].detach().clone()

    def gradients(self, cone: Cone, of: ProgramValue, wrt: Sequence[ProgramValue], seeds: Any) -> list[Tensor | None]:
        self._require_unchanged(cone)
        with isolated(None):
            y, leaves = run_cone(cone, of, wrt)
            ends = [leaves[value] for value in wrt if value in leaves]
            count = len(seeds)
            found: dict[ProgramValue, Tensor | None] = {}
            if ends and y.requires_grad:
                sweeps = [_sweep(y, ends, seed) for seed in seeds]
                for value, *parts in zip([value for value in wrt if value in leaves], *sweeps, strict=True):
                    found[value] = torch.stack(parts) if count else None
            return [found.get(value) for value in wrt]

    def embed(self, part: Tensor, around: Sequence[tuple[int, int]]) -> Tensor:
        if not any(map(any, around)):
            return part
        ends = [(before, before + size, behind) for (before, behind), size in zip(around, part.shape, strict=True)]
        embedded = part.new_zeros([stop + behind for _, stop, behind in ends])
        embedded[tuple([slice(start, stop) for start, stop, _ in ends])] = part
        return embedded


def _nodes_behind(outputs: Sequence[Tensor]) -> set[Any]:
    """Return the nodes of autograd's graph that some tensors depend on."""
    stack, seen = [y.grad_fn for y in outputs], set()
    while stack:
        node = stack.pop()
        if node is not None and node not in seen:
            seen.add(node)
            stack += [other for other, _ in node.next_functions]
    return seen


def _sweep(y: Tensor, ends: Sequence[Tensor], seed: Any) -> list[Tensor]:
    """Run one reverse sweep, from a cotangent or from the element at a flat position."""
    with without_autocast():
        target, cotangent = y, seed
        if not isinstance(seed, Tensor):
            alone = y.numel() == 1
            target, cotangent = (y, torch.ones_like(y)) if alone else (y.reshape(-1)[int(seed)], None)
        parts = torch.autograd.grad(target, ends, cotangent, retain_graph=True, allow_unused=True)
    return [
        torch.zeros_like(end) if part is None else materialize(part.to_dense() if part.is_sparse else part)
        for part, end in zip(parts, ends, strict=True)
    ]


class TorchCone(ConeBackend):
    op_seconds = 4e-4

    def record(self, run: TensorFunction, inputs: Sequence[Tensor | None], limit: int | None) -> TorchProgram:
        return TorchProgram(run, inputs, limit)

    def is_recorded(self, x: Any) -> bool:
        return isinstance(x, LazyTensor)


implementation = TorchCone()


def run_cone(
    cone: Cone,
    of: ProgramValue,
    wrt: Sequence[ProgramValue],
    grad: bool = True,
) -> tuple[Tensor, dict[ProgramValue, Tensor]]:
    """Run the operations of a cone on their parts; return the part that was asked for, and the leaves."""
    held: dict[ProgramValue, Tensor] = {}
    leaves: dict[ProgramValue, Tensor] = {}
    with torch.inference_mode(False), without_autocast(), torch.set_grad_enabled(grad):
        for value, box in cone.needed.items():
            if value.constant is not None:
                region = value.constant if sizes(box) == value.shape else value.constant[slices(box)]
                if value in wrt and grad:
                    region = leaves[value] = region.detach().clone().requires_grad_()
                held[value] = region
        for step in cone.steps:
            results = _run_step(step, cone.needed, held, grad)
            for made, result, part in zip(step.op.results, results, step.boxes, strict=True):
                if made is None or part is None:
                    continue
                if tuple(result.shape) != sizes(part):
                    raise NoConeError(f"{step.op.name} gave shape {tuple(result.shape)} for {sizes(part)}")
                if made in wrt and grad:
                    # It stays in the graph, as another source may lie above it.
                    result = result if result.requires_grad else result.detach().requires_grad_()
                    leaves[made] = result
                held[made] = result
        return held[of], leaves


def _run_step(step: Any, needed: Mapping[ProgramValue, Box], held: Mapping[ProgramValue, Tensor], grad: bool) -> Any:
    if step.is_empty:
        pairs = zip(step.op.results, step.boxes, strict=True)
        device = next((x.device for x in held.values()), None)
        return [None if box is None else torch.empty(sizes(box), dtype=y.dtype, device=device) for y, box in pairs]
    regions: list[Tensor | None] = []
    for value, need in zip(step.op.operands, step.needs, strict=True):
        if need is None:
            regions.append(None)
        else:
            region = held[value]
            regions.append(region if need == needed[value] else region[slices(need, needed[value])])
    if step.op.details.grad or not grad:
        return step.op.rule.run(regions, step.needs, step.boxes)
    with torch.no_grad():
        return step.op.rule.run(regions, step.needs, step.boxes)
