"""PyTorch."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from typing import Any, NoReturn, cast

import numpy as np
import torch
from torch._C._dynamo.eval_frame import get_eval_frame_callback

from elementgrad import backends, cleanup
from elementgrad.backends.limits import Limits
from elementgrad.backends.linear import Linear, Run, Use
from elementgrad.backends.model import Model
from elementgrad.backends.protocol import Backend, Kind, Picked
from elementgrad.backends.recorder import Recorder
from elementgrad.backends.torch import ambient
from elementgrad.backends.torch.compiler import in_graph, once_imported
from elementgrad.backends.torch.linear import TorchLinear
from elementgrad.backends.torch.matrices import TorchMatrices
from elementgrad.backends.torch.memory import materialize
from elementgrad.backends.torch.model import TorchModel, root, unwrapped
from elementgrad.backends.torch.quiet import from_state, plainly, undisturbed
from elementgrad.backends.torch.scores import largest, slopes
from elementgrad.backends.torch.uses import kept, uses
from elementgrad.backends.training import Trainer
from elementgrad.backends.witness import Told, Witness
from elementgrad.errors import FrameworkError, TracedError
from elementgrad.selection import Selection

Tensor = torch.Tensor
NUMBERS: dict[type, Kind] = {torch.SymInt: "i", torch.SymFloat: "f", torch.SymBool: "b"}
"""What the compiler makes of numbers that change from call to call."""
PLAIN: dict[Kind, type] = {"b": np.bool_, "i": np.int64, "f": np.float64, "c": np.complex128}
"""What NumPy calls the numbers of `Tensor.tolist`."""


class TorchBackend(TorchMatrices, Backend):
    """The operations of `Backend` on `torch.Tensor`."""

    name = "torch"

    def owns(self, kind: type) -> bool:
        return issubclass(kind, Tensor)

    def remembers(self, kind: type) -> bool:
        return not kind.__module__.startswith("torch._")  # stand-ins of the compiler, which cannot guard on them

    def number(self, value: Any) -> Kind | None:
        return NUMBERS.get(type(value))

    def shape(self, x: Tensor) -> tuple[int, ...]:
        return x.shape

    def kind(self, x: Tensor) -> Kind:
        dtype = x.dtype
        if dtype.is_floating_point:
            return "f"
        return "c" if dtype.is_complex else "b" if dtype is torch.bool else "i"

    def read(self, x: Tensor) -> np.ndarray | None:
        if torch._is_functional_tensor(x):  # a shell, and what lies in it is not its values
            return None
        try:
            return x.numpy(force=True)
        except (RuntimeError, TypeError):  # no storage to read, or a dtype that NumPy lacks
            if type(x) is not Tensor or torch.compiler.is_compiling():
                return None
        if x.is_floating_point() and x.element_size() < 4:
            return self.read(x.float())
        return _read_wrapped(x, PLAIN[self.kind(x)])

    def refuse(self, traced: Tensor, why: str) -> NoReturn:
        if torch.compiler.is_compiling():
            traced.nonzero()  # where graph breaks are allowed, the compiler takes this as its cue for one
        raise TracedError(why)

    compiling = staticmethod(torch.compiler.is_dynamo_compiling)

    def dtype(self, x: Tensor) -> str:
        return str(x.dtype).removeprefix("torch.")

    def compiles(self) -> bool:
        return torch.compiler.is_dynamo_compiling() or get_eval_frame_callback() not in (None, False)

    def uncompiled(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        return function(*arguments, **options)

    def limits(self, x: Tensor) -> Limits | None:
        return _limits(x.dtype)

    def cast(self, value: Any, like: Tensor) -> Tensor:
        if isinstance(value, Tensor):
            return value.to(like.dtype)
        return torch.as_tensor(value, dtype=like.dtype, device=like.device)

    def tensor(self, array: np.ndarray) -> Tensor:
        return torch.tensor(array.astype(array.dtype.newbyteorder("="), copy=False))

    def fresh(self, x: Tensor) -> Tensor:
        return x.clone()

    def materialize(self, x: Tensor) -> Tensor:
        return materialize(x)

    def kept(self, x: Tensor) -> Tensor:
        return kept(x)

    def take(self, x: Tensor, selection: Selection) -> Tensor:
        if selection.traced:
            return torch.ops.aten.index.Tensor(x, _mesh(x, selection))  # x[...] would read an index of no axes
        index, flips = selection.basic or selection.native(partial(_on, x.device))
        taken = x[index]
        return taken.flip(flips) if flips else taken

    def put(self, x: Tensor, selection: Selection, value: Any) -> Tensor:
        if selection.traced:
            return x.index_put(_mesh(x, selection), self.cast(value, x))
        index, flips = selection.basic or selection.native(partial(_on, x.device))
        edited = x.clone()
        try:
            edited[index] = value.expand(selection.shape).flip(flips) if flips and isinstance(value, Tensor) else value
        except (RuntimeError, TypeError) as error:
            if x.layout is not torch.strided:
                raise FrameworkError(f"elements of layout {x.layout} cannot be set; give x.to_dense()") from None
            if "vmap" not in str(error):
                raise
            # vmap refuses to write what it maps over into what it does not; index_put makes the batch itself.
            return x.index_put(_mesh(x, selection), value)
        return edited

    def accumulate(self, x: Tensor, selection: Selection, value: Any, multiply: bool) -> Tensor:
        if multiply:
            traced = next(part for part in selection.parts if isinstance(part, Tensor))
            self.refuse(
                traced,
                "PyTorch cannot multiply at traced indices, which may repeat; "
                "give concrete indices, or .set(place.get() * value) if none repeats",
            )
        return x.index_put(_mesh(x, selection), self.cast(value, x), accumulate=True)

    def where(self, mask: Any, x: Tensor, y: Tensor) -> Tensor:
        return torch.where(_on(x.device, mask), x, y)

    def stop(self, x: Tensor) -> Tensor:
        return x.detach()

    def reshape(self, x: Tensor, shape: tuple[int, ...]) -> Tensor:
        return x.reshape(shape)

    def broadcast(self, x: Tensor, shape: tuple[int, ...]) -> Tensor:
        return x.expand(shape)

    def soft_choice(self, x: Tensor, logits: Tensor, axis: int) -> Tensor:
        weights = torch.softmax(logits, axis).to(x.dtype)
        return (weights * torch.where(weights == 0, 0, x)).sum(axis)

    def hard_choice(self, x: Tensor, logits: Tensor, axis: int) -> Tensor:
        chosen = logits.argmax(axis, keepdim=True)
        return x.gather(axis, chosen.expand(*x.shape[:axis], 1, *x.shape[axis + 1 :])).squeeze(axis)

    def graft(self, value: Tensor, slope: Tensor) -> Tensor:
        return _graft(value, slope)

    def models(self, function: Any) -> bool:
        return isinstance(function, torch.nn.Module) or root(function) is not None

    def model(self, function: Callable[..., Any]) -> Model:
        return TorchModel(function)

    def trainer(self, model: Any) -> Trainer:
        from elementgrad.backends.torch.training.trainer import TorchTrainer

        if not isinstance(model, torch.nn.Module):
            raise FrameworkError(f"{model!r} is a method of a model; give the torch.nn.Module itself")
        return TorchTrainer(model)

    def called(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return unwrapped(function).forward if isinstance(function, torch.nn.Module) else function

    def undisturbed(self, function: Callable[..., Any]) -> AbstractContextManager[Any]:
        return undisturbed(function)

    def surroundings(self, linear: Linear) -> Any:
        return cast(TorchLinear, linear).state, torch.get_default_dtype()

    def within(self, surroundings: Any) -> AbstractContextManager[Any]:
        return from_state(*surroundings)

    def linearize(self, run: Run, inputs: Sequence[Tensor], create_graph: bool, order: int) -> Linear:
        return TorchLinear.of(run, inputs, create_graph)

    def uses(self, run: Run, inputs: Sequence[Tensor], input: int) -> tuple[Linear, list[Use]]:
        return uses(run, inputs, input)

    def recorder(self, tensors: Sequence[Tensor]) -> Recorder:
        from elementgrad.backends.torch.recorder import TorchRecorder

        return TorchRecorder(tensors)

    def slopes(
        self,
        model: Model,
        parameters: Mapping[str, Tensor],
        losses: Callable[..., Iterable[Tensor]],
        squared: bool,
        give: Callable[[str, Tensor], None],
    ) -> None:
        slopes(cast(TorchModel, model), parameters, losses, squared, give)

    def largest(
        self, x: Tensor, count: int, floor: float, minus: Tensor | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        return largest(x, count, floor, minus)

    def itemsize(self, x: Tensor) -> int:
        return x.element_size()

    def zeros(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        return torch.zeros(shape, dtype=like.dtype, device=like.device)

    def units(self, like: Tensor, positions: np.ndarray, batch: int) -> Tensor:
        count = len(positions)
        seeds = torch.zeros((count, *like.shape), dtype=like.dtype, device=like.device)
        if count * batch == 1:
            seeds.view(-1)[int(positions[0])].fill_(1)
        else:
            places = torch.from_numpy(positions).to(like.device).view(count, 1, 1).expand(count, batch, 1)
            seeds.view(count, batch, -1).scatter_(2, places, 1)
        return seeds

    def floats(self, x: Tensor) -> np.ndarray | None:
        return self.read(x.detach().double())

    def convert(self, x: Tensor, dtype: str) -> Tensor:
        return x.detach().to(getattr(torch, dtype))

    def precision(self, dtype: str | None) -> AbstractContextManager[Any]:
        from elementgrad.backends.torch.explaining.widening import Widening

        return ambient.in_mode(Widening()) if dtype in ("float64", "complex128") else nullcontext()

    def sample(self, run: Run, tensors: Sequence[Tensor | None]) -> Sequence[Tensor]:
        from elementgrad.backends.torch.explaining.witness import sample

        return sample(run, tensors)

    def told(self, of: Picked, wrt: Picked) -> Told:
        from elementgrad.backends.torch.explaining.live import told

        return told(of, wrt)

    def step(self, function: Callable[[], Any], wrt: Tensor | None) -> Told:
        from elementgrad.backends.torch.explaining.step import told

        return told(function, wrt)

    def witness(self, run: Run, source: Tensor | None, probe: bool) -> Witness:
        from elementgrad.backends.torch.explaining.witness import TorchWitness

        return TorchWitness(run, source)

    def concat(self, parts: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(parts))

    def transpose(self, x: Tensor, axes: tuple[int, ...]) -> Tensor:
        return x.permute(axes)

    def matmul(self, x: Tensor, y: Tensor) -> Tensor:
        with plainly():
            return x @ y

    def free(self, like: Tensor) -> int | None:
        return torch.cuda.mem_get_info(like.device)[0] if like.is_cuda else None


class _Graft(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(value: Tensor, slope: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[None, Tensor]:
        return None, upstream

    @staticmethod
    def jvp(ctx: Any, of_value: Tensor, of_slope: Tensor) -> Tensor:
        return of_slope.clone()


@in_graph  # the compiler cannot trace through a Function that has forward mode
def _graft(value: Tensor, slope: Tensor) -> Tensor:
    return _Graft.apply(value, slope)


@cache
def _limits(dtype: torch.dtype) -> Limits | None:
    try:
        if dtype.is_floating_point or dtype.is_complex:
            return Limits.of_floats(torch.finfo(dtype))
        return Limits.of_integers(torch.iinfo(dtype))
    except TypeError:  # booleans, and bits without a meaning
        return None


def _read_wrapped(x: Tensor, dtype: type) -> np.ndarray | None:
    """What `torch.func.grad` and `jvp` wrap has values, though no storage; what vmap maps over has none to give."""
    try:
        return np.array(x.tolist(), dtype=dtype).reshape(x.shape)
    except (RuntimeError, OverflowError):
        return None


def _on(device: torch.device, array: Any) -> Tensor:
    """An index array as a tensor on a device; traced ones are tensors already."""
    if not isinstance(array, np.ndarray):
        return array
    return torch.from_numpy(array.copy()).to(device)  # a copy: PyTorch warns of memory that is read-only, as ours is


def _mesh(x: Tensor, selection: Selection) -> tuple[Tensor, ...]:
    parts = [_on(x.device, np.asarray(part) if isinstance(part, int) else part) for part in selection.mesh()]
    # Beside others an index of no axes gets one: the compiler takes the result for a scalar otherwise.
    return tuple([part.reshape(1) if not part.ndim and selection.shape else part for part in parts])


backend = TorchBackend()
backends.on_whole(in_graph)
cleanup.on_entry(ambient.snapshot)
once_imported(lambda: setattr(TorchBackend, "uncompiled", torch.compiler.disable(TorchBackend.uncompiled)))
