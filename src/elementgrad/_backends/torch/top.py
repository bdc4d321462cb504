"""Derivatives of losses with respect to parameters, one at a time, and the largest elements of a tensor."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch

from elementgrad._backends.topk import group_by_size
from elementgrad._backends.torch.autodiff import disable_checkpointing
from elementgrad._backends.torch.isolate import enter_modes, isolated, plainly, removed_later, state
from elementgrad._backends.torch.names import TorchModel
from elementgrad._cleanup import defer, enter, scope
from elementgrad._train.backend import TopBackend
from elementgrad.errors import FrameworkError, UnconnectedError

Tensor = torch.Tensor
Give = Callable[[str, Tensor], None]
Sample = tuple[list[Tensor], list[Tensor], bool]
"""Losses, a seed for each, and whether their graph is needed again."""
PIECE = 2**18
"""How many elements are ranked or added at once: what is made on the way of a large gradient stays small."""
FREED = "backward through the graph a second time"


def slopes(
    model: TorchModel,
    parameters: Mapping[str, Tensor],
    losses: Callable[..., Iterable[Tensor]],
    squared: bool,
    give: Give,
) -> None:
    """Give the derivative of the sum of the losses for each parameter, or the sum of the squares of theirs.

    Leaves that share the memory of the parameters stand in for them, so that neither `.grad` nor `requires_grad` nor a
    hook of theirs is met. A list of losses has all its graphs at once. What yields them has one at a time, and so is
    run again for each group of parameters whose sums are no larger together than the largest parameter.
    """
    now = state()
    with scope():
        disable_checkpointing(False)
        # In this thread: what is computed again on the way back must find the buffers that are lent to it.
        defer(torch._C._set_multithreading_enabled, torch._C._is_multithreading_enabled())
        torch._C._set_multithreading_enabled(False)
        with scope():
            enter_modes()
            leaves = _stand_ins(model, parameters)
        enter(model.prepare(leaves, None))
        with _unwritten(parameters):
            groups = _groups(leaves)
            before: list[float] = []
            for number, group in enumerate(groups):
                with isolated(model.function, now), _same_modes(model):
                    found = losses()
                    if isinstance(found, list):
                        _from_list(leaves, groups, _connected(found, parameters), squared, give)
                        return
                    values: list[float] = []
                    _sum(group, _one_by_one(_connected(found, parameters), squared, values), squared, give)
                before = before if number else values
                if len(values) != len(before) or not np.allclose(values, before, 1e-3, 1e-6, equal_nan=True):
                    raise FrameworkError(
                        "loss_fn gives other losses when it is asked again, as it is for each group of parameters; "
                        "start it from the same data each time, or return a list of losses"
                    )


def largest(x: Tensor, count: int, floor: float, minus: Tensor | None) -> tuple[np.ndarray, np.ndarray]:
    """Size and position of the elements that are largest in size; see `Backend.topk_abs`."""
    wide, start = _wide(x), 0
    sizes = [torch.zeros(0, dtype=wide, device=x.device)]
    places = [torch.zeros(0, dtype=torch.int64, device=x.device)]
    others = None if minus is None else _pieces(minus.detach().to(x.device))
    for piece in _pieces(x.detach()):
        size = (piece.to(wide) if others is None else piece.to(wide) - next(others).to(wide)).abs()
        unknown = (~size.isfinite()).nonzero().view(-1)[:1]
        if len(unknown):
            return size[unknown].double().numpy(force=True), (start + unknown).numpy(force=True)
        place = (size >= floor).nonzero().view(-1)
        sizes.append(size[place])
        places.append(start + place)
        start += len(piece)
        if sum(map(len, sizes)) > 2 * max(count, PIECE):
            size, place = _first(torch.cat(sizes), torch.cat(places), count)
            sizes, places, floor = [size], [place], max(floor, float(size.min()))
    size, place = _first(torch.cat(sizes), torch.cat(places), count)
    return size.double().numpy(force=True), place.numpy(force=True)


def _first(sizes: Tensor, places: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The largest; of equal ones those that stand first, on which `topk` promises nothing."""
    if len(sizes) <= count:
        return sizes, places
    least = sizes.topk(count, sorted=False).values.min()
    kept = sizes > least
    kept[(sizes == least).nonzero().view(-1)[: count - int(kept.sum())]] = True
    return sizes[kept], places[kept]


def _pieces(x: Tensor) -> Iterator[Tensor]:
    """The elements in order, a piece at a time: no copy of the whole, also where they lie in another order."""
    if x.numel():
        rows = x if x.dim() else x.view(1)
        for some in rows.split(max(1, PIECE * len(rows) // rows.numel())):
            yield from some.reshape(-1).split(PIECE)


def _wide(x: Tensor) -> torch.dtype:
    """A dtype in which squares of small numbers do not vanish, where the device has it."""
    return torch.float32 if x.device.type == "mps" else torch.float64


def _stand_ins(model: TorchModel, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Leaves that share the memory of the parameters; copies of those that their modules write to when called."""
    modules = [module for _, module in model._modules() if getattr(module, "max_norm", None) is not None]
    written = {id(x) for module in modules for x in module._parameters.values()}
    return {
        name: (x.clone().detach() if x.is_inference() or id(x) in written else x.detach()).requires_grad_()
        for name, x in parameters.items()
    }


def _groups(leaves: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    found = group_by_size({name: leaf.numel() for name, leaf in leaves.items()})
    return [{name: leaves[name] for name in names} for names in found]


def _from_list(
    leaves: Mapping[str, Tensor], groups: list[dict[str, Tensor]], found: Iterable[Tensor], squared: bool, give: Give
) -> None:
    losses = list(found)
    if not squared or sum(loss.numel() for loss in losses) == 1:  # the largest square is that of the largest
        _back((losses, [torch.ones_like(loss) for loss in losses], False), leaves, give)
        return
    for group in groups:
        _sum(group, (([loss], [seed], True) for loss in losses for seed in _units(loss)), squared, give)


def _one_by_one(losses: Iterable[Tensor], squared: bool, values: list[float]) -> Iterator[Sample]:
    for loss in losses:
        values.append(float(loss.detach().sum()))
        left = loss.numel() if squared else 1
        for seed in _units(loss) if squared else [torch.ones_like(loss)]:
            left -= 1
            yield [loss], [seed], left > 0
        del loss, seed  # and the graph with it, before the next one is made


def _units(loss: Tensor) -> Iterator[Tensor]:
    for number in range(loss.numel()):
        seed = torch.zeros_like(loss)
        seed.view(-1)[number] = 1
        yield seed


def _sum(leaves: Mapping[str, Tensor], samples: Iterable[Sample], squared: bool, give: Give) -> None:
    """Give the sum over samples for each parameter that one of them reaches."""
    sums: dict[str, Tensor] = {}

    def add(name: str, gradient: Tensor) -> None:
        if name not in sums:
            sums[name] = torch.zeros(gradient.shape, dtype=_wide(gradient), device=gradient.device)
        for total, piece in zip(_pieces(sums[name]), _pieces(gradient), strict=True):
            piece = piece.to(total.dtype)
            total += piece.square() if squared else piece

    for sample in samples:
        _back(sample, leaves, add)
        del sample
    for name in list(sums):
        give(name, sums.pop(name))


def _back(sample: Sample, leaves: Mapping[str, Tensor], take: Give) -> None:
    """One sweep back that hands on each gradient when it is whole, and keeps none."""

    def taken(name: str, leaf: Tensor) -> None:
        gradient, leaf.grad = leaf.grad, None
        if gradient is not None:
            take(name, gradient.to_dense() if gradient.layout is not torch.strided else gradient)

    losses, seeds, again = sample
    try:
        with plainly():
            handles = removed_later()
            for name, leaf in leaves.items():
                leaf.grad = None  # the user's function may have called backward itself
                handles.extend(map(leaf.register_post_accumulate_grad_hook, [partial(taken, name)]))
            torch.autograd.backward(losses, seeds, retain_graph=again, inputs=list(leaves.values()))
    except RuntimeError as error:
        if FREED in str(error):
            raise FrameworkError(
                "the graph of a loss is freed, by a backward() in loss_fn or as the losses that it yields share one; "
                "return them as they are, in a list"
            ) from error
        raise


def _connected(losses: Iterable[Tensor], parameters: Mapping[str, Tensor]) -> Any:
    """The losses, each of which has a gradient, and through the model that the function was given."""
    outside = {id(x): name for name, x in parameters.items()}

    def checked(loss: Tensor) -> Tensor:
        if not loss.requires_grad:
            raise UnconnectedError(
                "a loss has no gradient, as under torch.no_grad() or behind .item() and .detach(); return what is "
                "computed from the model that loss_fn is given, or put loss_fn(model).backward() into a function and "
                "ask eg.explain(step), which names the line"
            )
        for leaf in _leaves(loss):
            if id(leaf) in outside:
                raise FrameworkError(
                    f"the loss uses {outside[id(leaf)]} as it was taken from the model elsewhere; take it from the "
                    "model that loss_fn is given"
                )
        return loss

    return map(checked, losses)


def _leaves(loss: Tensor) -> Iterator[Tensor]:
    """The tensors at which the graph of a loss ends."""
    ahead = [loss.grad_fn] if loss.grad_fn is not None else []
    seen: set[Any] = set(ahead)
    while ahead:
        node: Any = ahead.pop()
        if hasattr(node, "variable"):
            yield node.variable
        following = {other for other, _ in node.next_functions if other is not None} - seen
        seen |= following
        ahead.extend(following)


@contextmanager
def _unwritten(parameters: Mapping[str, Tensor]) -> Iterator[None]:
    """Nothing in here writes to the parameters, whose memory is the user's."""
    versions = {name: x._version for name, x in parameters.items() if not x.is_inference()}
    yield
    for name, version in versions.items():
        if parameters[name]._version != version:
            raise FrameworkError(f"loss_fn has written to {name} in place, which stays; write to a copy of it instead")


@contextmanager
def _same_modes(model: TorchModel) -> Iterator[None]:
    """Modules train or not as they did before."""
    with scope():
        defer(_set_training, [(module, module.training) for _, module in model._modules()])
        yield


def _set_training(modules: Iterable[tuple[torch.nn.Module, bool]]) -> None:
    for module, training in modules:
        module.training = training


class TorchTop(TopBackend):
    parameter_gradients = staticmethod(slopes)
    topk_abs = staticmethod(largest)


implementation = TorchTop()
