"""`eg.watch`: the `Watch` of a run, the `WatchError` that it ends with, and its `WatchReplay`."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from weakref import WeakMethod

from elementgrad._backends import registry
from elementgrad._backends.base import Backend
from elementgrad._backends.registry import not_compiled
from elementgrad._cleanup import InterruptSafeExit, OwnedUndos, defer, with_cleanup, with_rollback
from elementgrad._explain.trace import cannot_follow
from elementgrad._files import writable
from elementgrad._names.arguments import option_error
from elementgrad._place.place import Place, parse_place
from elementgrad._watch.backend import Hit, ReplayedRun, Rule, WatchBackend, WatchOptions
from elementgrad._watch.capture import hash_of, listed_omitted, read_capture, require_same_model, write_capture
from elementgrad._watch.locate import locate
from elementgrad._watch.report import WatchReport
from elementgrad.errors import FrameworkError, OptionError, WatchError, quoted

Tensor = Any
FRAMEWORKS = ("torch", "tensorflow", "jax")


def watch(
    model: Any,
    optimizer: Any = None,
    *,
    when: Any = "nonfinite",
    capture: Any = "nan.capture",
    loss: Callable[..., Any] | None = None,
) -> "Watch":
    """Watch a training run, and stop it at the first number that is not finite, with the element, line and cause.

    On PyTorch the watch is a block around the loop. On JAX it is the step itself, `step = eg.watch(step)`, a function
    of state and batch that returns the new state. In Keras, `elementgrad.callbacks.KerasWatch` does the same in `fit`.

    Looked at are the outputs of the model, the gradients after each backward and the parameters after each step; on
    Keras the loss and all variables after each step, on JAX all that the step returns. A gradient that a GradScaler is
    about to skip is no hit.

    Args:
        model: The model on PyTorch; the step on JAX.
        optimizer: The optimizer, or a list of them. Without one, parameters are not looked at after a step.
        when: A dict of rules to stop at as well, from places to functions of the gradient there (on JAX of
            the value that the step returns), such as `{"emb.weight[7]": lambda g: abs(g).max() > 10}`.
        capture: The file to write on a hit, from which the step can be replayed; None for none.
        loss: The loss as a function of the model's output. It is followed too, where the fault is behind the output.
            A function of more than the output is called as `watch.loss(output, target)` in the loop; a module of
            PyTorch can be called as it is.

    Returns:
        The `Watch`. On PyTorch it is a context manager, on JAX it is called in place of the step.

    Raises:
        FrameworkError: The model is none that can be watched.
        PlaceError: A rule is for a place that the model does not have.
        OptionError: An option has a value that it cannot have.

    >>> import torch, elementgrad as eg
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> try:
    ...     with eg.watch(model, optimizer, capture=None):
    ...         for x in (torch.ones(1, 2), torch.tensor([[1.0, float("nan")]])):
    ...             model(x).sum().backward()
    ...             optimizer.step()
    ... except eg.WatchError as error:
    ...     print(error.step, error.place, error.cause)
    1 input[0, 1] bad-input
    """
    if _backend_of(model).name == "tensorflow":
        raise FrameworkError(
            "a Keras model is watched in fit, by model.fit(..., callbacks=[elementgrad.callbacks.KerasWatch()])"
        )
    return Watch(model, optimizer, when, capture, loss)


class Watch:
    """A run that is watched. Make one with `eg.watch`."""

    __module__ = "elementgrad"

    def __init__(self, model: Any, optimizer: Any, when: Any, capture: Any, loss: Any):
        self._undos = OwnedUndos()
        self._model, self._loss = model, loss
        self._path = None if capture is None else writable(capture, "nan.capture")
        if loss is not None and not callable(loss):
            raise option_error("loss", loss, "cannot be called; give a function of the model's output")
        self._framework = _backend_of(model)
        self._backend: WatchBackend = self._framework.load("watch")
        self._error: WatchError | None = None
        self._arguments: Any = None
        """The arguments of the step that was captured, some of which a file may lack."""
        self._begun = self._ended = False
        self._outer: BaseException | None = None
        stop = _WhileAlive(self._stop)
        options = WatchOptions(_parse_rules(when), loss, stop, captures=capture is not None)
        self._watcher = self._backend.watcher(model, optimizer, options)

    @with_rollback
    def __enter__(self) -> "Watch":
        if self._begun or self._ended:
            raise OptionError("a watch is of one block; call eg.watch again for another")
        self._begun = True
        self._outer = sys.exc_info()[1]
        self._undos.adopt(self)
        self._watcher.start()
        defer(_WhileAlive(self._finish))
        return self

    __exit__ = InterruptSafeExit()

    def __del__(self) -> None:
        if "_undos" in self.__dict__ and "_watcher" in self.__dict__:
            self._begun = False  # nothing is looked at here, as an error would be lost
            self._undos.undo_in_thread()

    def _finish(self) -> None:
        """Look at the end of the block, unless it ends with an error, which nothing may hide."""
        error = sys.exc_info()[1]
        while isinstance(error, GeneratorExit):  # of the generator that ends the block
            error = error.__context__
        ends = self._begun and self._error is None and error is self._outer
        self._begun, self._ended = False, True
        if ends:
            self._watcher.finish()

    def close(self, look: bool = True) -> None:
        """End the watch, as the end of its block does; for callbacks, which have no block.

        Args:
            look: False to look at nothing any more.
        """
        self._begun = self._begun and look
        self._undos.undo()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the step that is watched, on JAX.

        Args:
            *args: Its arguments.
            **kwargs: Its keyword arguments.

        Returns:
            The result of the step.
        """
        return self._watcher.call(*args, **kwargs)

    def loss(self, *args: Any, **kwargs: Any) -> Any:
        """Call the loss that was given as `loss=`, so that its arguments are known if it is to be followed.

        Args:
            *args: Its arguments, the model's output first.
            **kwargs: Its keyword arguments.

        Returns:
            The loss.
        """
        if self._loss is None:
            raise OptionError("no loss was given; give it as eg.watch(..., loss=fn)")
        return self._watcher.call_loss(*args, **kwargs)

    @property
    def error(self) -> WatchError | None:
        """The error that the run was stopped with; None while it is healthy."""
        return self._error

    def replay(self, capture: Any = None) -> "WatchReplay":
        """Run the captured step again, forward and backward, to the same bits, and explain it.

        Args:
            capture: The file; left out for the one that this watch wrote.

        Returns:
            The `WatchReplay`.

        Raises:
            OptionError: There is no capture, it is damaged, or it is of another model.

        >>> import torch, elementgrad as eg
        >>> model = torch.nn.Linear(2, 1)
        >>> try:
        ...     with eg.watch(model, capture="example.capture") as watch:
        ...         model(torch.tensor([[1.0, float("nan")]]))
        ... except eg.WatchError as error:
        ...     print(watch.replay().same, error.place)
        True input[0, 1]
        """
        path = capture if capture is not None else self._error.capture if self._error is not None else None
        if path is None:
            raise OptionError("nothing was captured; give a file, as in watch.replay('nan.capture')")
        return replay(path, self._model, self._loss, self._arguments if capture is None else None)

    @with_cleanup  # a hook of the user's loop gets here, without a verb around it
    def _stop(self, hit: Hit) -> None:
        report, decided, hit = _explain(hit)
        content, writes = self._watcher.agree(report.to_json(), decided)
        report = WatchReport.from_json(content)
        if writes and self._path is not None and hit.captured is not None:
            try:
                step = hit.captured()
                write_capture(self._path, step, report, self._backend)
                self._arguments = step.arguments
            except Exception as error:
                failure = getattr(error, "strerror", None) or error
                report = replace(report, evidence=(f"{self._path} could not be written: {failure}", *report.evidence))
            else:
                report = replace(report, capture=str(self._path))
        self._error = report.error()
        if self._begun:  # a callback has no block that would end with the error
            self._undos.undo()
        raise self._error


class _WhileAlive:
    """A method of a watch as the model and the registered undos hold it: it does nothing once the watch is gone.

    They must not keep the watch alive, since its `__del__` runs the undos where several interrupts kept the end of the
    block from it.
    """

    def __init__(self, method: Callable[..., None]):
        self._method = WeakMethod(method)

    def __call__(self, *args: Any) -> None:
        method = self._method()
        if method is not None:
            method(*args)


def _explain(hit: Hit) -> tuple[WatchReport, bool, Hit]:
    """Return the report of a hit, True if the fault was found or was known before, and the hit or its other one."""
    more: dict[str, Any] = {"step": hit.step, "micro_batch": hit.micro_batch}
    if hit.cause is not None:
        more |= {"where": hit.where, "module": hit.module, "state": hit.state, "evidence": hit.evidence}
        return WatchReport.of_cause(hit.tripped, hit.cause, hit.place, hit.value, **more), True, hit
    evidence: list[str] = list(hit.evidence)
    try:
        report = locate(hit.record(), hit.tripped) if hit.record is not None else None
    except Exception as error:  # that it cannot be explained must not hide that it happened
        report = None
        evidence.append(cannot_follow(error))
    decided = report is not None and report.cause not in ("unseen",)
    if (report is None or report.cause == "unseen") and hit.otherwise is not None:
        return _explain(hit.otherwise)
    if report is None:
        report = WatchReport.of_cause(hit.tripped, "unseen", hit.place, hit.value)
    return replace(report, **more, evidence=(*report.evidence, *evidence)), decided, hit


@dataclass(frozen=True)
class WatchReplay:
    """A captured step that ran again. `print` it."""

    __module__ = "elementgrad"

    same: bool | None
    """True if outputs and gradients have the same bits as in the run; None if there is nothing to compare with."""
    report: str
    """The explanation of this run of the step."""
    place: str | None = None
    """The earliest bad element, as in `WatchError`."""
    cause: str | None = None
    where: str | None = None
    results: Mapping[str, Tensor] = field(default_factory=dict, repr=False)
    """Outputs and gradients: `output:0`, `gradient:a.weight`."""
    differing: tuple[str, ...] = ()
    """The results whose bits are others."""
    omitted: tuple[str, ...] = ()
    """The parts of the step that the capture lacks, so that they did not run again."""

    def __str__(self) -> str:
        bits = {
            True: "the same bits as in the run",
            False: f"other bits than in the run: {', '.join(self.differing)}",
            None: "it ran, with nothing to compare",
        }
        lacks = f"; the capture lacks {listed_omitted(self.omitted)}" if self.omitted else ""
        return f"{self.report}\nreplay: {bits[self.same]}{lacks}"


@not_compiled
def replay(path: Any, model: Any, loss: Callable[..., Any] | None = None, arguments: Any = None) -> WatchReplay:
    """Run the step of a capture again with the model that it is of."""
    backend = _backend_of(model).load("watch")

    def named(name: str) -> WatchBackend:
        if name != backend.name:
            raise OptionError(
                f"the capture is of {quoted(name)}, and the model of {backend.name}; give the one it is of"
            )
        return backend

    capture = read_capture(path, named, arguments)
    require_same_model(capture.step.model, backend.describe(model))
    run: ReplayedRun = backend.run(model, capture.step, loss)
    common = capture.hashes.keys() & run.results.keys()
    differing = tuple(sorted(name for name in common if hash_of(run.results[name], backend) != capture.hashes[name]))
    old = capture.report
    hit = Hit(old.tripped, old.step, old.micro_batch, run.record)
    report = old if old.cause in ("update", "rule") else replace(_explain(hit)[0], rank=old.rank)
    if report.where is None and report.place == old.place:  # only the loop of the run has a line of the user's
        report = replace(report, where=old.where)
    same = not differing if common else None
    omitted = tuple(capture.step.omitted)
    return WatchReplay(same, str(report), report.place, report.cause, report.where, run.results, differing, omitted)


def _backend_of(model: Any) -> Backend:
    backend = registry.backend_of_model(model)
    if backend is not None and backend.name == "jax" and not callable(model):  # a pytree of parameters
        backend = None
    if backend is None and callable(model):
        backend = next((each for each in registry.imported_backends() if each.name == "jax"), None)
    if backend is None:
        raise FrameworkError(
            f"{type(model).__name__} cannot be watched; give a torch.nn.Module, or a step of JAX, and for Keras use "
            "elementgrad.callbacks.KerasWatch"
        )
    return backend


def _parse_rules(when: Any) -> dict[str, tuple[Place, Rule]]:
    """Return the rules of `when=` by the texts of their places; numbers that are not finite always count."""
    if isinstance(when, str) and when == "nonfinite":
        return {}
    if not isinstance(when, Mapping):
        raise option_error(
            "when",
            when,
            'is neither "nonfinite" nor a dict of rules, as {"emb.weight[7]": lambda g: abs(g).max() > 10}',
        )
    rules: dict[str, tuple[Place, Callable[[Any], bool]]] = {}
    for text, rule in when.items():
        place = parse_place(text)
        if place is None or place.name is None:
            raise OptionError(f"when={{{quoted(text)}: ...}} has no name; give a place such as 'emb.weight[7]'")
        if not callable(rule):
            raise OptionError(
                f"the rule for {place} is {quoted(rule)}, which cannot be called; give a function of the gradient there"
            )
        rules[str(place)] = (place, partial(_judge, str(place), rule))
    return rules


def _judge(text: str, rule: Callable[[Any], Any], x: Any) -> bool:
    """Return the result of a rule; an error that it raises is the user's own."""
    result = rule(x)
    try:
        return bool(result)
    except Exception as error:
        raise OptionError(
            f"the rule for {text} returns {type(result).__name__} with several elements, and not one truth value; "
            "let it end in .any() or .all()"
        ) from error
