"""What PyTorch says when it refuses a gradient, as a cause and a step."""

import re
import traceback
from collections.abc import Sequence
from dataclasses import dataclass

from elementgrad.backends.lines import is_users, spelled
from elementgrad.backends.torch.explaining.measures import Overwrite
from elementgrad.backends.torch.explaining.watch import Watch
from elementgrad.backends.witness import STATISTIC, TO_A_LEAF, Remark, Step

CHANGED = "modified by an inplace operation"
TWICE = "backward through the graph a second time"
LEAF = "leaf Variable that requires grad"
UNUSED = "appears to not have been used in the graph"
UNTRACKED = "does not require grad"
MISSING = re.compile(r"(?:derivative for '?(?:aten::)?|: )(\w+)'? is not implemented")
SHAPE = re.compile(r"\[torch\.\w+ \[([\d, ]*)\]\]")
ARGUMENT = re.compile(r"function '(\w+)' is not differentiable with respect to argument '(\w+)'")
MAKER = re.compile(r"output \d+ of (\w+?)(?:Backward)?\d*,")


def undifferentiable(error: RuntimeError) -> Remark | None:
    """What PyTorch says of an argument by which a function has no derivative; None if it is about something else.

    A batch norm has none by its statistics, and a cross entropy none by the weights of its classes.
    """
    found = ARGUMENT.search(str(error))
    if found is None:
        return None
    function, argument = found.group(1).removeprefix("native_"), found.group(2)
    evidence = f"PyTorch has no derivative of {function} by {argument}"
    if argument.startswith("running_"):
        return Remark("not-tracked", evidence, Step(STATISTIC))
    return Remark("no-rule", evidence, Step(function, _line(error)))


@dataclass(frozen=True)
class Refused:
    """What ran before PyTorch refused."""

    steps: Sequence[Step]
    overwrites: Sequence[Overwrite]
    backwards: Sequence[Step]
    carried: Step | None

    @classmethod
    def after(cls, watch: Watch) -> "Refused":
        """What a watch has seen."""
        return cls(watch.steps, watch.overwrites, watch.asking.backwards, watch.carried)

    def remark(self, error: BaseException) -> Remark | None:
        """The cause of an error of PyTorch's; None if it is none that is known."""
        for text in (str(error), str(error.__cause__ or "")):
            if CHANGED in text:
                return Remark("modified-in-place", "the gradient needs the numbers from before", self._writer(text))
            if LEAF in text:
                return Remark("modified-in-place", "", Step(TO_A_LEAF, _line(error)))
            if TWICE in text:
                return self._twice()
            missing = MISSING.search(text)
            if missing:
                word = missing.group(1).strip("_")
                step = next((step for step in self.steps if step.operation == word), Step(word))
                return Remark("no-rule", "", step)
        return None

    def _twice(self) -> Remark:
        if self.carried is not None:
            evidence = f"{self.carried.operation} takes a tensor that was computed before, in a graph that is gone"
            return Remark("freed-graph", evidence, self.carried)
        earlier = [step.where for step in self.backwards[:-1] if step.where]
        evidence = f"backward() was called before, at {earlier[-1]}" if earlier else ""
        return Remark("freed-graph", evidence, self.backwards[-1] if self.backwards else None)

    def _writer(self, text: str) -> Step | None:
        """The write that PyTorch complains of: to a tensor of that shape, made by that function, if it says so."""
        found = SHAPE.search(text)
        shape = tuple([int(size) for size in found.group(1).split(",") if size.strip()]) if found else None
        fitting = [write for write in self.overwrites if shape is None or write.shape == shape] or self.overwrites
        maker = MAKER.search(text)
        if maker:
            fitting = [write for write in fitting if write.maker == maker.group(1).lower()] or fitting
        return fitting[-1].step if fitting else None


def _line(error: BaseException) -> str | None:
    """The user's line that an error comes from."""
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    users = [spelled(file, line) for file, line in frames if is_users(file, ["torch"])]
    return users[-1] if users else None
