"""Updates of a watched PyTorch optimizer: what a step starts from, and taking it again.

An optimizer overwrites parameters and state, so that copies from before the step are needed to take it again. They are
made for small models alone: for large ones they would cost more than all else that a watch does.
"""

from collections.abc import Mapping
from inspect import signature
from typing import Any

import torch

from elementgrad._backends.torch.trace_memory import version_of

Tensor = torch.Tensor
LIMIT = 1 << 20
"""Parameters of so many elements in all are copied before each step."""
PLAIN = (bool, int, float, str, type(None))


class UpdateBefore:
    """The parameters, gradients and state that a step of an optimizer starts from."""

    def __init__(self, optimizer: Any):
        self._optimizer = optimizer
        self._parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._values = [p.detach().clone() for p in self._parameters]
        self._grads = [(p.grad, None if p.grad is None else version_of(p.grad)) for p in self._parameters]
        states = [optimizer.state.get(p, {}) for p in self._parameters]
        self._states = [{k: v.clone() if isinstance(v, Tensor) else v for k, v in state.items()} for state in states]

    @classmethod
    def of(cls, optimizer: Any) -> "UpdateBefore | None":
        """Copy what a step starts from; None if that is too large."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        is_plain = all(p.layout is torch.strided and not hasattr(p, "to_local") for p in parameters)
        small = is_plain and sum([p.numel() for p in parameters]) <= LIMIT
        return cls(optimizer) if small else None

    def values(self) -> dict[int, Tensor]:
        """Return the parameters from before the step, by the `id()` of those that it wrote to."""
        return {id(p): value for p, value in zip(self._parameters, self._values, strict=True)}

    def capture(self) -> tuple[dict[str, Tensor], dict[str, Any], dict[str, Tensor]]:
        """Return tensors, settings in JSON, and the parameters after the step; nothing if it cannot be taken again."""
        kind = type(self._optimizer)
        unchanged = all(g is None or version_of(g) == version for g, version in self._grads)
        if _optimizer_named(kind.__name__) is not kind or not unchanged:
            return {}, {}, {}
        tensors: dict[str, Tensor] = {}
        plain: list[dict[str, Any]] = []
        for n, (value, (grad, _), state) in enumerate(zip(self._values, self._grads, self._states, strict=True)):
            named = {"value": value, "grad": grad, **{f"state.{k}": v for k, v in state.items()}}
            tensors |= {f"update.{n}.{key}": x.detach() for key, x in named.items() if isinstance(x, Tensor)}
            plain.append({k: v for k, v in state.items() if isinstance(v, PLAIN)})
        groups = []
        for n, group in enumerate(self._optimizer.param_groups):
            try:
                options = {
                    key: _to_json(value, f"update.option.{n}.{key}", tensors)
                    for key, value in _options(kind, group).items()
                }
            except TypeError:
                return {}, {}, {}
            groups.append({"count": len(group["params"]), "options": options})
        results = {f"updated:{n}": p.detach() for n, p in enumerate(self._parameters)}
        return tensors, {"optimizer": kind.__name__, "groups": groups, "states": plain}, results


def run_update(settings: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Take a captured step again, and return the parameters after it."""
    kind = _optimizer_named(str(settings["optimizer"]))
    if kind is None:
        return {}
    parameters: list[Tensor] = []
    groups: list[dict[str, Any]] = []
    for group in settings["groups"]:
        numbers = range(len(parameters), len(parameters) + int(group["count"]))
        new = [tensors[f"update.{n}.value"].clone().requires_grad_() for n in numbers]
        options = {key: _from_json(value, tensors) for key, value in group["options"].items()}
        groups.append({"params": new, **_options(kind, options)})
        parameters += new
    optimizer: Any = kind(groups)  # type: ignore[call-arg]
    for n, p in enumerate(parameters):
        p.grad = tensors.get(f"update.{n}.grad")
        start = f"update.{n}.state."
        state = {name.removeprefix(start): x.clone() for name, x in tensors.items() if name.startswith(start)}
        if state or settings["states"][n]:
            optimizer.state[p] = settings["states"][n] | state
    optimizer.step()
    return {f"updated:{n}": p.detach() for n, p in enumerate(parameters)}


def _to_json(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """Return an option in JSON: a tensor as its name in `tensors`, where it is put, and a tuple as a list."""
    if isinstance(value, Tensor):
        tensors[name] = value.detach()
        return {"tensor": name}
    if type(value) is tuple:
        return [_to_json(each, f"{name}.{n}", tensors) for n, each in enumerate(value)]
    if not isinstance(value, PLAIN):
        raise TypeError(type(value).__name__)
    return value


def _from_json(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, dict):
        return tensors[value["tensor"]].clone()
    return tuple([_from_json(each, tensors) for each in value]) if isinstance(value, list) else value


def _optimizer_named(name: str) -> type[torch.optim.Optimizer] | None:
    """Return an optimizer of PyTorch itself: no other code runs for the sake of a file."""
    kind = getattr(torch.optim, name, None)
    return kind if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) else None


def _options(kind: type, group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a group that an optimizer is made with; schedulers may have added others."""
    known = set(signature(kind).parameters) - {"params"}
    return {key: value for key, value in group.items() if key in known}
