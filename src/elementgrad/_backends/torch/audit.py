"""The part of PyTorch in `eg.audit`: which parameters train, and a summary of the gradient of each.

A loss is differentiated by the parameters themselves, through `torch.autograd.grad`, so that no `.grad` is touched. A
training step runs as it is: hooks on the parameters see what `backward()` adds to `.grad`, and everything is put back.
Optimizers find no gradients, so that they do nothing.
"""

import copy
import math
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import numpy as np
import torch
from torch.nn.parameter import UninitializedParameter
from torch.overrides import TorchFunctionMode

from elementgrad._audit.backend import (
    AuditBackend,
    AuditedParameter,
    GradientSummary,
    Sweep,
    follows_from_missing,
    result_of,
)
from elementgrad._backends.source_location import is_user_code
from elementgrad._backends.torch import _compat
from elementgrad._backends.torch.autodiff import disable_checkpointing
from elementgrad._backends.torch.isolate import add_hook, deferred_handles, enter_mode, isolated, without_autocast
from elementgrad._backends.torch.names import TorchModel
from elementgrad._backends.torch.record.intercept import name_of
from elementgrad._backends.torch.top import graph_leaves
from elementgrad._backends.torch.trace_memory import is_same
from elementgrad._cleanup import AttributePatch, Replace, assign, defer, scope
from elementgrad._place.place import Place
from elementgrad._train.top_backend import TopBackend
from elementgrad.errors import FrameworkError, OptionError

Tensor = torch.Tensor
LOOKUPS = (
    *("EmbeddingBackward0", "EmbeddingBagBackward0", "EmbeddingSparseBackward0", "IndexBackward0"),
    *("IndexSelectBackward0", "GatherBackward0", "SliceBackward0", "SelectBackward0", "TakeBackward0"),
)
"""The nodes of functions that take some rows."""
MOVES = (
    *("TBackward0", "ViewBackward0", "TransposeBackward0", "ToCopyBackward0", "UnsqueezeBackward0", "CloneBackward0"),
    *("ExpandBackward0", "ReshapeAliasBackward0", "PermuteBackward0", "AliasBackward0", "SqueezeBackward1"),
)
"""The nodes of functions that take all elements as they are."""
SCALES = 16
"""The most runs of a step while its scaler lowers the factor of the loss."""


class TorchAudit(AuditBackend):
    """Audits modules."""

    def parameters(self, model: TorchModel) -> list[AuditedParameter]:  # type: ignore[override]
        if isinstance(model.function, torch.jit.ScriptModule):
            raise FrameworkError("a scripted model is closed; give the module that it was made of")
        groups = _element_groups(model)
        found: list[AuditedParameter] = []
        for name, kind, x in model.named_tensors():
            if kind != "parameter" or not x.is_floating_point():
                continue
            if isinstance(x, UninitializedParameter):
                raise FrameworkError(f"{name} has no shape yet; call the model once, so that its lazy layers get one")
            if x.is_meta:
                raise FrameworkError(f"{name} is on the device meta and has no numbers; load the model first")
            trained = groups.get(id(x), ())
            found += [
                _make_parameter(str(group.place), group.leaf, _freeze_reason(group.leaf), result_of(name))
                for group in trained
            ]
            frozen = "elements that do not train" if trained else _freeze_reason(x)
            found.append(_make_parameter(name, x, frozen))
        return found

    def summarize_loss(
        self,
        model: TorchModel,  # type: ignore[override]
        parameters: Sequence[AuditedParameter],
        loss: Callable[[Any], Tensor],
    ) -> Sweep:
        with scope():
            disable_checkpointing(False, faithful=True)
            with isolated(model.function):
                model.restore_training_flags()
                value = loss(model.function)
                if not value.requires_grad:
                    return Sweep({})
                lookups, has_rules = _walk(value)
                try:
                    with without_autocast():
                        tensors = [each.tensor for each in parameters]
                        gradients: list[Any] = list(torch.autograd.grad(value.reshape(()), tensors, allow_unused=True))
                except RuntimeError as error:
                    if not _is_refusal(error):
                        raise
                    return Sweep({})  # nothing has a gradient, and the explanation says why
        summaries = {}
        for index, each in enumerate(parameters):
            gradient, gradients[index] = gradients[index], None
            if gradient is not None:
                summaries[each.name] = _summarize(gradient, id(each.tensor) in lookups)
        return Sweep(summaries, has_rules, bool(value.isfinite().all()))

    def summarize_step(
        self,
        model: TorchModel,  # type: ignore[override]
        parameters: Sequence[AuditedParameter],
        step: Callable[[], Any],
    ) -> Sweep | None:
        with _LossScales() as scales:
            for _ in range(SCALES):
                sweep = _run_step(model, parameters, step)
                finite = sweep is None or all(math.isfinite(each.largest) for each in sweep.summaries.values())
                if finite or not scales.backed_off():
                    break
        return sweep

    def loss_of_step(self, model: TorchModel, step: Callable[[], Any]) -> Callable[[], Tensor]:  # type: ignore[override]
        return partial(_loss_of, model, step)

    @contextmanager
    def undoing_steps(self, model: TorchModel) -> Iterator[None]:  # type: ignore[override]
        with _LossScales():
            _protect(model)
            yield

    def remarks(self, model: TorchModel) -> list[str]:  # type: ignore[override]
        modules = [module for root in model.roots.values() for module in root.modules()]
        remarks = ["the model is compiled, and ran eagerly for this"] if any(map(_compat.is_compiled, modules)) else []
        scripted = [path for path, module in model.modules() if isinstance(module, torch.jit.ScriptModule)]
        outermost = [path for path in scripted if path.rpartition(".")[0] not in scripted]
        if outermost:
            some = ", ".join(outermost[:3]) + (" and others" if len(outermost) > 3 else "")
            remarks.append(
                f"{some} {'is' if len(outermost) == 1 else 'are'} scripted, so that what runs in it is not seen, and "
                "the cause of a missing gradient may not be found; give the module that it was made of"
            )
        return remarks


implementation = TorchAudit()


def _run_step(model: TorchModel, parameters: Sequence[AuditedParameter], step: Callable[[], Any]) -> Sweep | None:
    summaries: dict[str, GradientSummary] = {}
    with scope():
        calls = _BackwardCalls(_protect(model))
        with isolated(step):
            handles = deferred_handles()
            for each in parameters:
                hook = partial(_note, summaries, each.name, calls)
                handles.extend(map(each.tensor.register_post_accumulate_grad_hook, [hook]))
            enter_mode(calls)
            ended_by = None
            try:
                step()
            except Exception as error:
                if _is_refusal(error):
                    summaries.clear()
                elif calls.untracked and follows_from_missing(error, "torch"):
                    ended_by = error
                else:
                    raise
    return Sweep(summaries, calls.has_rules, calls.is_finite, ended_by) if calls.count else None


class _LossScales(scope):
    """The scalers (`GradScaler`) that a step uses, whose states are restored at the end.

    A scaler starts with a factor at which gradients overflow, and lowers it with each step that it skips for that. So
    gradients that are not finite mean nothing until a step runs at which the factor stays.
    """

    def __init__(self) -> None:
        self._states: dict[Any, tuple[dict[str, Any], Any]] = {}
        self._factors: dict[Any, float] = {}

    def __enter__(self) -> "_LossScales":
        super().__enter__()
        defer(self._restore)
        _scale_patch.enter()
        assign(_local, "scales", self)
        return self

    def see(self, scaler: Any) -> None:
        if scaler not in self._states:
            self._states[scaler] = scaler.state_dict(), copy.deepcopy(_compat.optimizer_stages(scaler))
            self._factors[scaler] = scaler.get_scale()

    def backed_off(self) -> bool:
        """Return True if a scaler has lowered its factor since this was last called."""
        before, self._factors = self._factors, {scaler: scaler.get_scale() for scaler in self._factors}
        return any(factor < before[scaler] for scaler, factor in self._factors.items())

    def _restore(self) -> None:
        for scaler, (state, stages) in self._states.items():
            if scaler.state_dict() != state:  # it would count as a write to what a scaled loss still needs
                scaler.load_state_dict(state)
            _compat.set_optimizer_stages(scaler, stages)


class _ScaleState(threading.local):
    scales: _LossScales | None = None


_local = _ScaleState()


def _install(replace: Replace) -> None:
    scale = torch.amp.GradScaler.scale

    @wraps(scale)
    def seen(self: Any, outputs: Any) -> Any:
        if _local.scales is not None and self.is_enabled():
            _local.scales.see(self)
        return scale(self, outputs)

    replace(torch.amp.GradScaler, "scale", seen)


_scale_patch = AttributePatch(_install)


def _is_refusal(error: Exception) -> bool:
    """Return True if PyTorch refuses to compute gradients, for a reason that an explanation finds."""
    text = str(error)
    return _compat.is_inplace_error(text) or _compat.operation_without_derivative(text) is not None


def _element_groups(model: TorchModel) -> dict[int, list[Any]]:
    """Return the groups of elements that train, by the `id()` of the parameter that they are elements of."""
    groups: dict[int, list[Any]] = {}
    for _, module in model.modules():
        for parameter in module.__dict__.get("_trained", {}).values():
            groups.setdefault(id(parameter.tensor), list(parameter.groups))
    return groups


def _make_parameter(name: str, x: Tensor, frozen: str | None, place: Place | None = None) -> AuditedParameter:
    return AuditedParameter(name, x, tuple(x.shape), str(x.dtype).removeprefix("torch."), frozen, place)


def _freeze_reason(x: Tensor) -> str | None:
    return None if x.requires_grad else "requires_grad=False"


def _summarize(gradient: Tensor, is_lookup: bool) -> GradientSummary:
    gradient = gradient.detach()
    if gradient.layout is not torch.strided:
        gradient, is_lookup = gradient.to_dense(), True
    if not gradient.numel():
        return GradientSummary(1.0)
    gradient = gradient if gradient.dim() else gradient.reshape(1)
    rows, columns = [], []
    # In pieces that stay in the cache, which is four times as fast as a norm of the whole along each axis.
    for piece in gradient.split(max(1, TopBackend.PIECE * len(gradient) // gradient.numel())):
        sizes = piece.abs().float() if piece.dtype in (torch.float16, torch.bfloat16) else piece.abs()
        rows.append(sizes.flatten(1).amax(1) if sizes.dim() > 1 else sizes)
        if sizes.dim() > 1:
            columns.append((sizes.flatten(2).amax(2) if sizes.dim() > 2 else sizes).amax(0))
    slices = {0: torch.cat(rows).double().numpy(force=True)}
    if columns:
        slices[1] = torch.stack(columns).amax(0).double().numpy(force=True)
    return GradientSummary(float(np.max(slices[0])), slices, is_lookup)


def _walk(loss: Tensor) -> tuple[set[int], bool]:
    """Walk through the graph of a loss.

    Return the `id()` of the leaves of which every function takes some rows alone, and True if the user wrote the
    derivative of a function.
    """
    has_rules = False
    readers: dict[int, bool] = {}
    pending: list[tuple[Any, str]] = [(loss.grad_fn, "")] if loss.grad_fn is not None else []
    seen: set[tuple[Any, str]] = set()
    while pending:
        node, reader = pending.pop()
        name = node.name()
        has_rules = has_rules or (isinstance(node, _compat.PythonNode) and _is_user_function(node))
        if hasattr(node, "variable"):
            key = id(node.variable)
            readers[key] = readers.get(key, True) and reader in LOOKUPS
            continue
        # What a moved or cast parameter is read by counts as its reader.
        here = reader if name.startswith(MOVES) and reader in LOOKUPS else name
        for following, _ in node.next_functions:
            if following is not None and (following, here) not in seen:
                seen.add((following, here))
                pending.append((following, here))
    return {key for key, only in readers.items() if only}, has_rules


def _is_user_function(node: Any) -> bool:
    """Return True for a node of an `autograd.Function` that is no part of PyTorch or of this library."""
    module = sys.modules.get(getattr(type(node), "_forward_cls", type(node)).__module__)
    return is_user_code(getattr(module, "__file__", None) or "<stdin>", ("torch",))


def _note(summaries: dict[str, GradientSummary], name: str, calls: "_BackwardCalls", x: Tensor) -> None:
    if x.grad is not None:
        summary = _summarize(x.grad, id(x) in calls.lookups)
        summaries[name] = summary if name not in summaries else summaries[name].union(summary)


def _protect(model: TorchModel) -> list[Tensor]:
    """Take the gradients of a model away and idle all optimizers, until the innermost open scope is left.

    Then gradients, parameters and modes are as they were. Return the parameters.
    """
    parameters = [x for _, kind, x in model.named_tensors() if kind == "parameter"]
    parameters += [group.leaf for groups in _element_groups(model).values() for group in groups]
    for x in parameters:
        defer(_restore, x, x.grad, x.detach().clone())
        x.grad = None
    model.restore_training_flags()
    idle = _IdleOptimizers()
    add_hook(_compat._global_optimizer_pre_hooks, idle.before)
    add_hook(_compat._global_optimizer_post_hooks, idle.after)
    return parameters


def _restore(x: Tensor, gradient: Tensor | None, before: Tensor) -> None:
    if not is_same(x.detach(), before):  # it would count as a write, though nothing has changed
        x.detach().copy_(before)
    x.grad = gradient


class _IdleOptimizers:
    """Takes the gradients away from an optimizer while it steps, so that it changes nothing."""

    def __init__(self) -> None:
        self._taken: dict[int, list[tuple[Tensor, Tensor | None]]] = {}

    def before(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        params = [x for group in optimizer.param_groups for x in group["params"]]
        self._taken[id(optimizer)] = [(x, x.grad) for x in params]
        defer(self.after, optimizer)
        if any(
            callable(given) for given in (*args, *kwargs.values())
        ):  # a closure makes gradients of its own, with which the optimizer steps
            before = {x: {k: copy.deepcopy(v) for k, v in state.items()} for x, state in optimizer.state.items()}
            defer(_restore_state, optimizer, before)
        for x in params:
            x.grad = None

    def after(self, optimizer: Any, *_: Any) -> None:
        for x, gradient in self._taken.pop(id(optimizer), ()):
            x.grad = gradient


def _restore_state(optimizer: Any, before: Mapping[Tensor, Mapping[str, Any]]) -> None:
    optimizer.state.clear()
    optimizer.state.update(before)


class _BackwardCalls(TorchFunctionMode):
    """Notes the calls of `backward()`; leaves out one on a loss without a graph, which PyTorch would refuse."""

    def __init__(self, protected: Sequence[Tensor]) -> None:
        super().__init__()
        self.count = 0
        self.untracked = False
        self.lookups: set[int] = set()
        self.has_rules = False
        self.is_finite = True
        self._protected = set(map(id, protected))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if name_of(func) == "backward":
            self.count += 1
            roots = [x for x, _ in _roots(args, kwargs)]
            if not any(x.requires_grad for x in roots):
                self.untracked = True
                return None
            tracked = [x for x in roots if x.requires_grad]
            self.is_finite = self.is_finite and all(bool(x.isfinite().all()) for x in tracked)
            walks = [_walk(x) for x in tracked]
            self.lookups = {key for lookups, _ in walks for key in lookups}
            self.has_rules = self.has_rules or any(found for _, found in walks)
            for leaf in [leaf for x in tracked for leaf in graph_leaves(x)]:
                if id(leaf) not in self._protected:  # an input, or a part of another model
                    self._protected.add(id(leaf))
                    defer(setattr, leaf, "grad", leaf.grad)
                    leaf.grad = None
        return func(*args, **kwargs)


class _CapturedLoss(TorchFunctionMode):
    """Keeps what `backward()` is called on, and does not call it."""

    def __init__(self) -> None:
        super().__init__()
        self.roots: list[tuple[Tensor, Tensor | None]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if name_of(func) == "backward":
            self.roots += _roots(args, kwargs)
            return None
        return func(*args, **kwargs)


def _roots(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[Tensor, Tensor | None]]:
    """Return the tensors that `backward()` is called on, each with the gradient that it starts from."""
    tensors = args[0] if args else kwargs["tensors"]
    seeds = args[1] if len(args) > 1 else kwargs.get("gradient", kwargs.get("grad_tensors"))
    tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    seeds = [seeds] * len(tensors) if seeds is None or isinstance(seeds, Tensor) else list(seeds)
    return list(zip(tensors, seeds, strict=False))


def _loss_of(model: TorchModel, step: Callable[[], Any]) -> Tensor:
    """Run a step up to its end, and return the sum of what it calls `backward()` on."""
    captured = _CapturedLoss()
    with implementation.undoing_steps(model), scope():
        enter_mode(captured)
        try:
            step()
        except Exception:  # without gradients a scaler or a norm may refuse to go on
            if not captured.roots:
                raise
    if not captured.roots:
        raise OptionError("the step called no backward() when it ran again; let it do the same each time")
    losses = [x if seed is None else (x * seed).sum() for x, seed in captured.roots]
    return losses[0] if len(losses) == 1 else torch.stack([loss.reshape(()) for loss in losses]).sum()
