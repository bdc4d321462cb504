"""`eg.audit`: a model and its loss in, an `Audit` out."""

import inspect
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from typing import Any

from elementgrad._audit.backend import AuditBackend, AuditedParameter, separator_of
from elementgrad._audit.groups import Investigation
from elementgrad._audit.result import Audit, Finding
from elementgrad._audit.survey import Survey
from elementgrad._backends import registry
from elementgrad._backends.base import Backend
from elementgrad._backends.registry import not_compiled
from elementgrad._cleanup import enter
from elementgrad._explain.api import explain
from elementgrad._explain.diagnosis import Diagnosis
from elementgrad._names.arguments import NamedFunction
from elementgrad._names.backend import Model
from elementgrad._names.call import BoundCall
from elementgrad._names.names import match_names
from elementgrad._place.grammar import listed, nearest
from elementgrad._place.place import Place, is_pattern
from elementgrad.errors import DtypeError, FrameworkError, OptionError, PlaceError, quoted

Tensor = Any


@not_compiled
def audit(model: Any, loss: Callable[..., Any], except_: str | Iterable[str] = ()) -> Audit:
    """Find out whether every parameter of a model learns, and name the cause, the line and the fix where one does not.

    The loss runs once, with one reverse sweep. Only if a parameter has no gradient, or one that is zero or not finite,
    it runs again under the recorder of `eg.explain`, or if it uses a derivative that the user wrote, which is then
    compared with differences. Nothing is disturbed: gradients, parameters, buffers, modes and
    random states are as they were. A compiled model runs eagerly, which a note says.

    Args:
        model: A `torch.nn.Module`, a Keras model or a pytree of `jax.Array`.
        loss: `loss(model)` returns one number; in JAX it is a function of the pytree. On PyTorch and Keras also a
            training step that takes nothing and ends in `backward()` or asks a tape: it runs as it is, its optimizer
            does nothing, and the parameters are restored.
        except_: Names of parameters or modules that need not learn, with wildcards as in `"pooler.*"`; also names
            of functions whose own derivatives are not meant to be the slopes of their values.

    Returns:
        The audit. `print` it; it is true if there are no findings.

    Raises:
        FrameworkError: If there is no model, or the loss is no tensor.
        OptionError: If the loss is not one number, a step computes no gradient, or nothing trains.
        PlaceError: If a name in `except_` fits nothing.

    >>> import torch, elementgrad as eg
    >>> class Model(torch.nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.trunk, self.head = torch.nn.Linear(3, 4), torch.nn.Linear(4, 1)
    ...
    ...     def forward(self, x):
    ...         return self.head(self.trunk(x).detach())
    >>> audit = eg.audit(Model(), lambda model: model(torch.ones(2, 3)).sum())
    >>> audit.ok, audit.findings[0].cause, audit.findings[0].parameters
    (False, 'detached', ('trunk.weight', 'trunk.bias'))
    >>> eg.audit(Model(), lambda model: model(torch.ones(2, 3)).sum(), except_=["trunk"]).ok
    True
    """
    backend = registry.backend_of_model(model)
    if backend is None:
        raise registry.no_model_error(model, "is no model with parameters of its own")
    if not callable(loss):
        raise OptionError(
            f"loss={quoted(loss)[:80]} cannot be called; give a function of the model, as in lambda model: "
            "loss(model(x), y), or a training step that takes nothing"
        )
    enter(backend.load("explain").without_number_checks())
    audited = backend.load("audit")
    named = backend.names.model(model)
    parameters = audited.parameters(named)
    parts = {each.name: [*_ancestors(each.name), each.name] for each in parameters}
    known = list(dict.fromkeys([part for each in parts.values() for part in each]))
    fitting, unknown = _match(except_, known, named)
    named_complex = [name for name, kind, x in named.named_tensors() if kind == "parameter" and backend.kind(x) == "c"]
    if named_complex and not parameters:
        raise DtypeError("the model has only complex parameters, which are not audited; look at them with eg.grad")
    trained, frozen, excepted = _sort(parameters, {name for name in parts if not fitting.isdisjoint(parts[name])})
    remarks = [Finding("remark", (), reason=text) for text in audited.remarks(named)]
    if named_complex:
        text = f"complex parameters are not audited: {listed(named_complex)}"
        remarks.append(Finding("remark", (), reason=text))
    is_step = _takes_nothing(loss)
    if is_step:
        sweep = audited.summarize_step(named, trained, loss)
        if sweep is None:
            raise OptionError(
                "the step ran and asked for no gradient; call loss.backward() in it, or tape.gradient(loss, "
                "model.trainable_variables), or give the loss as a function of the model"
            )
    else:
        sweep = audited.summarize_loss(named, trained, lambda model: check_loss(loss(model), backend))
    if sweep.ended_by is not None:
        error = f"{type(sweep.ended_by).__name__}: {sweep.ended_by}"
        remarks.append(Finding("remark", (), reason=f"the step then ended with {error}"))
    survey = Survey.of(trained, sweep)
    findings: list[Finding] = []
    notes = survey.notes
    if unknown or sweep.has_rules or not survey.is_fine:
        call = _bind(model, loss, audited, backend, is_step, trained)
        explain_step = partial(_explain_step, audited, named, loss) if is_step else None
        investigation = Investigation(call, named, trained, sweep.summaries, survey, explain_step)
        rules = investigation.rules
        strange = [] if rules is None else [text for text in unknown if text not in rules]
        if strange:
            raise PlaceError(
                f"except_ names {strange[0]!r}, and no parameter, module or custom derivative has that name; "
                f"{nearest(strange[0], [*known, *sorted(rules or ())])}"
            )
        findings, explained = investigation.results((rules or set()).difference(unknown))
        notes = [*explained, *notes]
    return Audit(
        tuple(findings),
        (*remarks, *notes),
        tuple([each.name for each in frozen]),
        tuple([each.name for each in excepted]),
        tuple([each.name for each in trained]),
    )


def _sort(
    parameters: Sequence[AuditedParameter], named: AbstractSet[str]
) -> tuple[list[AuditedParameter], list[AuditedParameter], list[AuditedParameter]]:
    """Return the parameters that are looked at, those that are frozen, and those that `except_` has named."""
    if not parameters:
        raise DtypeError("the model has no floating-point parameter, so there is nothing that could learn; give one")
    frozen = [each for each in parameters if each.frozen is not None]
    excepted = [each for each in parameters if each.frozen is None and each.name in named]
    trained = [each for each in parameters if each.frozen is None and each.name not in named]
    if len(frozen) == len(parameters):
        raise OptionError(
            f"none of the {len(frozen)} parameters trains: {listed([each.name for each in frozen])} "
            f"{'is' if len(frozen) == 1 else 'are'} frozen ({frozen[0].frozen}); let some train, and audit those"
        )
    if not trained:
        raise OptionError("except_ names every parameter that trains; leave some to look at")
    return trained, frozen, excepted


def _match(except_: Any, known: Sequence[str], model: Model) -> tuple[set[str], list[str]]:
    """Return those of the known parameters and modules that names and patterns fit.

    Also return the names that fit none. They may be those of operations with derivatives of the user's own.
    """
    texts = [except_] if isinstance(except_, str) else except_
    if not isinstance(texts, Iterable) or isinstance(texts, bytes):
        raise OptionError(f"except_={quoted(except_)} is no list of names; give some, as in except_=['pooler.*']")
    fitting: set[str] = set()
    unknown: list[str] = []
    for text in texts:
        if not isinstance(text, str):
            raise OptionError(f"except_ has {quoted(text)}, which is no name; give names, as in except_=['pooler.*']")
        names = [text, model.canonical_name(text)]
        matches = list(match_names(text, known, model.aliases())) if is_pattern(text) else names
        fitting.update(matches)
        unknown += [] if is_pattern(text) or any(name in known for name in matches) else [text]
    return fitting, unknown


def _ancestors(name: str) -> list[str]:
    parts = name.partition("[")[0].split(separator := separator_of(name))
    return [separator.join(parts[:count]) for count in range(1, len(parts) + ("[" in name))]


def _explain_step(audited: AuditBackend, model: Model, step: Callable[[], Any], parameter: Tensor) -> Diagnosis:
    """Explain by the step itself a parameter that the loss depends on, and that the step got no gradient for."""
    with audited.undoing_steps(model):
        return explain(step, wrt=parameter)


def _takes_nothing(loss: Callable[..., Any]) -> bool:
    try:
        return not inspect.signature(loss).parameters
    except (TypeError, ValueError):  # written in C
        return False


def check_loss(loss: Any, backend: Backend) -> Tensor:
    """Return what a loss function gave, if it is one real number."""
    if registry.backend_of(loss) is not backend:
        inner = getattr(loss, "loss", None)
        more = " it has a .loss: return that" if registry.backend_of(inner) is backend else " return the tensor"
        raise FrameworkError(f"the loss is {type(loss).__name__} and no tensor of {backend.name};{more}")
    if backend.kind(loss) != "f":
        raise DtypeError(f"the loss is of dtype {backend.dtype(loss)}, which has no gradients; return a real number")
    shape = tuple(backend.shape(loss))
    if any(size != 1 for size in shape):
        raise OptionError(
            f"the loss has shape {shape} and is no single number; return its sum or its mean, whichever is trained on"
        )
    return loss


def _bind(
    model: Any,
    loss: Callable[..., Any],
    audited: AuditBackend,
    backend: Backend,
    is_step: bool,
    trained: Sequence[AuditedParameter],
) -> BoundCall:
    """Return the call that computes the loss, with the model's own names."""
    if registry.module_of(model)[1] is None:  # a pytree, which is an argument like any other
        return BoundCall(loss, (model,), {})
    run = (
        audited.loss_of_step(backend.names.model(model), loss) if is_step else lambda: check_loss(loss(model), backend)
    )
    return BoundCall(NamedFunction(run, model), (), {}, [Place(trained[0].tensor)])
