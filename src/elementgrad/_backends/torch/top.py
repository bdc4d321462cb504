"""Gradients of losses for `eg.top`, one parameter at a time, and the elements of a tensor with the largest size."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from elementgrad._backends.torch._compat import backward_threads_enabled, is_freed_graph_error, set_backward_threads
from elementgrad._backends.torch.autodiff import disable_checkpointing, graph_nodes
from elementgrad._backends.torch.isolate import deferred_handles, enter_modes, isolated, state, without_autocast
from elementgrad._backends.torch.names import TorchModel
from elementgrad._cleanup import defer, enter, scope
from elementgrad._names.backend import Replacement
from elementgrad._train.top_backend import TopBackend, group_by_size, require_same_losses
from elementgrad.errors import FrameworkError, UnconnectedError

Tensor = torch.Tensor
Give = Callable[[str, Tensor], None]
"""Called with the name of a parameter and its gradient."""


class _Sweep(NamedTuple):
    """One backward from losses."""

    losses: list[Tensor]
    seeds: list[Tensor]
    keep_graph: bool


def parameter_gradients(
    model: TorchModel,
    parameters: Mapping[str, Tensor],
    losses: Callable[..., Iterable[Tensor]],
    squared: bool,
    give: Give,
) -> None:
    """Call `give` with the gradient of the sum of the losses for each parameter; see `TopBackend`.

    Leaves that share the memory of the parameters are put in their place, so that `.grad`, `requires_grad` and hooks of
    the parameters are left alone. A list of losses has all its graphs at once. A generator has one graph at a time; it
    is run again for each group of parameters, where the sums of a group are no larger than the largest parameter.
    """
    now = state()
    with scope():
        disable_checkpointing(False)
        # Checkpoints that run again in the backward must do so in this thread, where modules have copies of buffers.
        defer(set_backward_threads, backward_threads_enabled())
        set_backward_threads(False)
        with scope():
            enter_modes()
            leaves = _make_leaves(model, parameters)
        enter(model.prepare([Replacement(name, parameters[name], leaf) for name, leaf in leaves.items()], None))
        with _check_unwritten(parameters):
            groups = _groups(leaves)
            first_values: list[float] | None = None
            for group in groups:
                with isolated(model.function, now):
                    model.restore_training_flags()
                    result = losses()
                    checked = _check_connected(result, parameters)
                    if isinstance(result, list):
                        _give_from_list(leaves, groups, checked, squared, give)
                        return
                    values: list[float] = []
                    _give_sums(group, _sweeps(checked, squared, values), squared, give)
                first_values = values if first_values is None else first_values
                require_same_losses(first_values, values)


def _pieces(x: Tensor) -> Iterator[Tensor]:
    """Iterate over the elements in C order in pieces, without a copy of the whole for any strides."""
    if x.numel():
        rows = x if x.dim() else x.view(1)
        for chunk in rows.split(max(1, TopBackend.PIECE * len(rows) // rows.numel())):
            yield from chunk.reshape(-1).split(TopBackend.PIECE)


def _sum_dtype(x: Tensor) -> torch.dtype:
    # Squares of small numbers do not underflow in float64, which mps does not have.
    return torch.float32 if x.device.type == "mps" else torch.float64


def _make_leaves(model: TorchModel, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    # An embedding with max_norm writes to its table in the forward, and gets a copy of it.
    modules = [module for _, module in model.modules() if getattr(module, "max_norm", None) is not None]
    written = {id(x) for module in modules for x in module._parameters.values()}
    return {
        name: (x.clone().detach() if x.is_inference() or id(x) in written else x.detach()).requires_grad_()
        for name, x in parameters.items()
    }


def _groups(leaves: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    groups = group_by_size({name: leaf.numel() for name, leaf in leaves.items()})
    return [{name: leaves[name] for name in names} for names in groups]


def _give_from_list(
    leaves: Mapping[str, Tensor], groups: list[dict[str, Tensor]], checked: Iterable[Tensor], squared: bool, give: Give
) -> None:
    losses = list(checked)
    if not squared or sum(loss.numel() for loss in losses) == 1:  # of one number, squares have the same order as sizes
        _run_sweep(_Sweep(losses, [torch.ones_like(loss) for loss in losses], False), leaves, give)
        return
    for group in groups:
        sweeps = (_Sweep([loss], [seed], True) for loss in losses for seed in _one_hot_seeds(loss))
        _give_sums(group, sweeps, squared, give)


def _sweeps(losses: Iterable[Tensor], squared: bool, values: list[float]) -> Iterator[_Sweep]:
    for loss in losses:
        values.append(float(loss.detach().sum()))
        remaining = loss.numel() if squared else 1
        for seed in _one_hot_seeds(loss) if squared else [torch.ones_like(loss)]:
            remaining -= 1
            yield _Sweep([loss], [seed], remaining > 0)
        del loss, seed  # frees the graph before the next one is made


def _one_hot_seeds(loss: Tensor) -> Iterator[Tensor]:
    for position in range(loss.numel()):
        seed = torch.zeros_like(loss)
        seed.view(-1)[position] = 1
        yield seed


def _give_sums(leaves: Mapping[str, Tensor], sweeps: Iterable[_Sweep], squared: bool, give: Give) -> None:
    """Give the sum of the gradients, or of their squares, for each parameter that a sweep reaches."""
    sums: dict[str, Tensor] = {}

    def add(name: str, gradient: Tensor) -> None:
        if name not in sums:
            sums[name] = torch.zeros(gradient.shape, dtype=_sum_dtype(gradient), device=gradient.device)
        for total, piece in zip(_pieces(sums[name]), _pieces(gradient), strict=True):
            piece = piece.to(total.dtype)
            total += piece.square() if squared else piece

    for sweep in sweeps:
        _run_sweep(sweep, leaves, add)
        del sweep  # and the graph with it
    for name in list(sums):
        give(name, sums.pop(name))


def _run_sweep(sweep: _Sweep, leaves: Mapping[str, Tensor], give: Give) -> None:
    """Run a backward that gives each gradient as soon as it is complete, and keeps none."""

    def give_gradient(name: str, leaf: Tensor) -> None:
        gradient, leaf.grad = leaf.grad, None
        if gradient is not None:
            give(name, gradient.to_dense() if gradient.layout is not torch.strided else gradient)

    try:
        with without_autocast():
            handles = deferred_handles()
            for name, leaf in leaves.items():
                leaf.grad = None  # the user's function may have called backward itself
                handles.extend(map(leaf.register_post_accumulate_grad_hook, [partial(give_gradient, name)]))
            inputs = list(leaves.values())
            torch.autograd.backward(sweep.losses, sweep.seeds, retain_graph=sweep.keep_graph, inputs=inputs)
    except RuntimeError as error:
        if is_freed_graph_error(error):
            raise FrameworkError(
                "the graph of a loss is freed, by a backward() in loss_fn or as the losses that it yields share one; "
                "return them as they are, in a list"
            ) from error
        raise


def _check_connected(losses: Iterable[Tensor], parameters: Mapping[str, Tensor]) -> Iterable[Tensor]:
    """Iterate over the losses, and raise if one has no gradient or uses a parameter itself instead of its leaf."""
    originals = {id(x): name for name, x in parameters.items()}

    def check(loss: Tensor) -> Tensor:
        if not loss.requires_grad:
            raise UnconnectedError(
                "a loss has no gradient, as under torch.no_grad() or after .item() or .detach(); return what is "
                "computed from the model that loss_fn is given, or put loss_fn(model).backward() into a function and "
                "ask eg.explain(step), which names the line"
            )
        for leaf in graph_leaves(loss):
            if id(leaf) in originals:
                raise FrameworkError(
                    f"the loss uses {originals[id(leaf)]} as it was taken from the model elsewhere; take it from the "
                    "model that loss_fn is given"
                )
        return loss

    return map(check, losses)


def graph_leaves(loss: Tensor) -> Iterator[Tensor]:
    """Return an iterator over the leaves that a loss is computed from."""
    return (node.variable for node in graph_nodes([loss.grad_fn]) if hasattr(node, "variable"))


@contextmanager
def _check_unwritten(parameters: Mapping[str, Tensor]) -> Iterator[None]:
    """Raise if the parameters, whose memory the leaves share, were written to in the block."""
    versions = {name: x._version for name, x in parameters.items() if not x.is_inference()}
    yield
    for name, version in versions.items():
        if parameters[name]._version != version:
            raise FrameworkError(f"loss_fn has written to {name} in place, which stays; write to a copy of it instead")


class TorchTop(TopBackend):
    parameter_gradients = staticmethod(parameter_gradients)

    def pieces(self, x: Tensor) -> Iterator[np.ndarray]:
        for piece in _pieces(x.detach()):
            yield piece.to(_sum_dtype(x)).numpy(force=True).astype(np.float64, copy=False)


implementation = TorchTop()
