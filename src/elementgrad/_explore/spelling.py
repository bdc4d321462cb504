"""The words of the user's code for a model and its arguments, so that copied code runs where it came from."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from elementgrad._place.grammar import parse
from elementgrad._place.place import Place
from elementgrad.errors import ElementgradError


@dataclass(frozen=True)
class Spelling:
    """Names of variables: of the function, of its arguments in order, and of those by keyword.

    >>> from elementgrad._explore.spelling import Spelling
    >>> import elementgrad as eg
    >>> spelling = Spelling("net", ["image"])
    >>> places = {"of": eg.at("conv1")[0, 3], "wrt": eg.at("input")}
    >>> spelling.call("grad", places, {0: ["[0, 1].set(0.5)"]})
    "eg.grad(net, eg.at(image)[0, 1].set(0.5), of='conv1[0, 3]', wrt='input')"
    """

    function: str
    args: Sequence[str] = ()
    kwargs: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, frame: FrameType | None, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> "Spelling":
        """Look for variables of a frame that hold these very objects; others get usual names."""
        variables = {} if frame is None else {**frame.f_globals, **frame.f_locals}

        def spell(value: Any, default: str) -> str:
            for name, variable in variables.items():
                if variable is value and name.isidentifier() and not name.startswith("_"):
                    return name
            for name, variable in variables.items():
                if isinstance(variable, (tuple, list)) and not name.startswith("_"):
                    for position, item in enumerate(variable):
                        if item is value:
                            return f"{name}[{position}]"
            return default

        defaults = ["x"] if len(args) == 1 else [f"x{number}" for number in range(len(args))]
        return cls(
            spell(function, "model"),
            [spell(value, default) for value, default in zip(args, defaults, strict=True)],
            {name: spell(value, name) for name, value in kwargs.items()},
        )

    @classmethod
    def of_references(cls, references: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> "Spelling":
        """Take the names of variables from `file.py:name`, first of the function and then of its arguments."""
        names = [reference.rpartition(":")[2].removesuffix("()") for reference in references]
        usual = cls.of(None, None, args, kwargs)
        known = [name if name.isidentifier() else default for name, default in zip(names[1:], usual.args, strict=False)]
        function = names[0] if names[0].isidentifier() else usual.function
        return cls(function, known if len(known) == len(args) else usual.args, usual.kwargs)

    def call(self, verb: str, places: Mapping[str, Place], edits: Mapping[Any, Sequence[str]]) -> str:
        """Return the call of a verb; `edits` has the edits of arguments by position or keyword."""

        def edited(key: Any, name: str) -> str:
            for edit in edits.get(key, ()):
                name = f"eg.at({name}){edit}"
            return name

        args = [edited(position, name) for position, name in enumerate(self.args)]
        kwargs = [f"{name!r}: {edited(name, variable)}" for name, variable in self.kwargs.items()]
        parts = [self.function, *args, *([f"kwargs={{{', '.join(kwargs)}}}"] if kwargs else [])]
        parts += [f"{option}={spell_place(place)}" for option, place in places.items()]
        return f"eg.{verb}({', '.join(parts)})"


def spell_place(place: Place) -> str:
    """Return a place as Python: its text, or where a name does not survive that, the call that makes it."""
    text = str(place)
    try:
        survives = parse(text) == (place.name, place.index, place.kind)
    except ElementgradError:
        survives = False
    if survives:
        return repr(text)
    kind = f", kind={place.kind!r}" if place.kind else ""
    return f"eg.Place(name={place.name!r}, index={place.index!r}{kind})"


def calling_frame(depth: int) -> FrameType | None:
    """Return the frame of the user's code, `depth` calls above."""
    try:
        return sys._getframe(depth + 1)
    except ValueError:
        return None
