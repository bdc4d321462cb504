"""`names`: a table of everything in a function or model that `of` and `wrt` can name, and patterns over these names.

In a pattern `*` stays within one component of a name, and `**` crosses components.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache, partial
from types import MappingProxyType
from typing import Any

from elementgrad._backends import registry
from elementgrad._backends.registry import not_compiled
from elementgrad._html import Rows, Tabular
from elementgrad._names import pytree
from elementgrad._names.arguments import NOTHING, gather_arguments, option_error
from elementgrad._names.backend import GIVEN
from elementgrad._names.call import BoundCall
from elementgrad._place.grammar import KINDS, listed, nearest
from elementgrad._place.place import Place, is_pattern
from elementgrad.errors import PlaceError

Tensor = Any
FLOATING = ("float", "bfloat", "complex")
"""How the names of dtypes begin that have gradients."""
_SEPARATOR = re.compile(r"([./])")
_WILDCARD = re.compile(r"\*\*[./]|\*+")
_NAME = re.compile(r"([^#:]*)(.*)")
"""A name without the number of a call or a part, and these."""
_CALL = re.compile(rf"(.*)#\d+((?:{re.escape(GIVEN)})?(?::.*)?)")
_GIVEN_CALL = re.compile(rf"{re.escape(GIVEN)}(#[^:]*)")


@dataclass(frozen=True)
class Name:
    """One tensor of a function or model."""

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: str


class Names(Tabular, tuple[Name, ...]):
    """Names, printed as a table: inputs, then values in the order in which a run computes them, then the model's.

    In the table, repeated calls of a layer that give the same shape are one line, with a pattern that names them all.
    """

    __slots__ = ()

    def _rows(self) -> Rows:
        calls: dict[Any, list[Name]] = {}
        for row in self:
            call = _CALL.fullmatch(row.name)
            calls.setdefault((row.kind, *(call.groups() if call else (row.name, row.name))), []).append(row)
        lines: list[tuple[str, Name, int]] = []
        for (_, base, part), same in calls.items():
            if len(same) > 1 and len({(row.shape, row.dtype) for row in same}) == 1:
                lines.append((f"{base}#*{part or ''}", same[0], len(same)))
            else:
                lines += [(row.name, row, 1) for row in same]
        counted = any(count > 1 for _, _, count in lines)
        rows = [("name", "kind", "shape", "dtype", "calls")]
        for name, row, count in lines:
            shape = "x".join(map(str, row.shape)) or "()"
            rows.append((name, row.kind, shape, row.dtype, str(count) if count > 1 else ""))
        return rows if counted else [row[:-1] for row in rows]


@not_compiled
def names(
    model: Callable[..., Any],
    *args: Any,
    kwargs: Mapping[str, Any] = NOTHING,
    kind: str | None = None,
    match: str | None = None,
    names_from: Any = None,
    **arguments: Any,
) -> Names:
    """List the tensors of a function or model that can be named, found by one run of it that disturbs nothing.

    Args:
        model: A function or model. Without arguments it is not run, and its parameters and buffers are listed.
        args: Its arguments.
        kwargs: Its arguments by name.
        kind: Only names of this kind: "input", "output", "activation", "given", "parameter" or "buffer". What modules
            are given is listed only for `kind="given"`.
        match: Only names that match this pattern, in which `*` stands for any part of one component of a name, and
            `**` for any number of components.
        names_from: A model that the function calls and does not take as an argument; or a dict of models.
        arguments: More arguments by name.

    Returns:
        A tuple of rows with `name`, `kind`, `shape` and `dtype`, which prints as a table.

    Raises:
        PlaceError: no name matches the pattern.

    >>> import torch, elementgrad as eg
    >>> model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.ReLU())
    >>> eg.names(model, torch.ones(1, 3))
    name      kind        shape  dtype
    input     input       1x3    float32
    0         activation  1x2    float32
    1         activation  1x2    float32
    output    output      1x2    float32
    0.weight  parameter   2x3    float32
    0.bias    parameter   2      float32
    >>> eg.names(model, match="*.weight")
    name      kind       shape  dtype
    0.weight  parameter  2x3    float32
    """
    if kind is not None and kind not in KINDS:
        raise option_error("kind", kind, f"is none of {', '.join(KINDS)}")
    if match is not None and (not isinstance(match, str) or "[" in match):
        raise option_error("match", match, 'is not a pattern of names; give one such as "encoder.*.weight"')
    function, args, kwargs = gather_arguments(names, model, args, kwargs, arguments, names_from)
    backend = None if args or kwargs else registry.backend_of_model(function)
    if backend is None:
        call = BoundCall(function, args, kwargs)
        named_model, (rows, spellings) = call.model, list_names(call, kind)
    else:
        spellings = {}
        named_model = backend.names.model(function)
        rows = [_row(backend, *named) for named in named_model.named_tensors()]
    rows = [row for row in rows if kind in (None, row.kind)]
    aliases = {} if match is None else named_model.aliases()
    matches = None if match is None else match_names(_normalize(match), [row.name for row in rows], aliases, spellings)
    return Names([row for row in rows if matches is None or row.name in matches])


def list_names(call: BoundCall, kind: str | None = None) -> tuple[list[Name], dict[str, str]]:
    """Run a call once, and return all that has a name, and other spellings of names, each with the name.

    What modules are given is returned only for that kind.
    """
    backend = call.backend
    with backend.isolated(call.function):
        capture = call.capture_all(given=kind == "given")
    rows = [
        *[_row(backend, ref.name, "input", ref.tensor) for ref in call.inputs],
        *[Name(name, value.kind, *capture.described[value]) for name, value in capture.named_values()],
        *[_row(backend, *named) for named in call.model.named_tensors()],
    ]
    return rows, {other: name for (name, *others), _ in capture.spelled_values() for other in others}


def _row(backend: Any, name: str, kind: str, tensor: Tensor) -> Name:
    return Name(name, kind, tuple(backend.shape(tensor)), backend.dtype(tensor))


def expand_patterns(call: BoundCall, *trees: Any) -> Sequence[Any]:
    """Return trees of places in which each pattern is a dict of the places that it matches, by their texts.

    A pattern matches what `eg.names` lists, of the dtypes that have gradients. Finding that takes a run.
    """
    if not any(is_pattern(place.name) for tree in trees for place in pytree.leaves_of(tree)):
        return trees
    rows = cache(partial(list_names, call))
    aliases = call.model.aliases()

    def expand(place: Place) -> Any:
        if not is_pattern(place.name):
            return place
        if place.kind is None and _normalize(str(place.name)).partition(":")[0].endswith(GIVEN):
            with suppress(PlaceError):  # what is itself called `input` has the name
                return _match_rows(place, *rows(None), aliases)
            return _match_rows(place, *rows("given"), aliases)
        return _match_rows(place, *rows(place.kind), aliases)

    return [pytree.map_tree(tree, expand) for tree in trees]


def _normalize(pattern: str) -> str:
    """Return a pattern with the number of a call before `.input`, as in names that are listed."""
    return _GIVEN_CALL.sub(rf"\1{GIVEN}", pattern)


def _match_rows(
    place: Place, rows: Iterable[Name], spellings: Mapping[str, str], aliases: Mapping[str, str]
) -> dict[str, Place]:
    fitting = [row for row in rows if place.kind in (None, row.kind) and row.dtype.startswith(FLOATING)]
    matches = match_names(_normalize(str(place.name)), [row.name for row in fitting], aliases, spellings)
    kinds: dict[str, list[str]] = {}
    for row in fitting:
        kinds.setdefault(row.name, []).append(row.kind)
    places = [
        Place(None, text, place.index, kind if place.kind or len(kinds[name]) > 1 else None, pointwise=place.pointwise)
        for name, text in matches.items()
        for kind in kinds[name]
    ]
    return {str(each): each for each in places}


def expand_place(
    place: Place, named: Iterable[tuple[str, Any]], aliases: Callable[[], Mapping[str, str]]
) -> list[Place]:
    """Return a place for each tensor that a pattern matches, by the first name that does; another place as it is."""
    if not is_pattern(place.name):
        return [place]
    named = list(named)
    matches = match_names(str(place.name), [name for name, _ in named], aliases())
    names: dict[int, str] = {}
    for name, tensor in named:
        if name in matches:
            names.setdefault(id(tensor), name)
    return [Place(None, name, place.index, place.kind, pointwise=place.pointwise) for name in names.values()]


def match_names(
    pattern: str,
    names: Sequence[str],
    aliases: Mapping[str, str] = MappingProxyType({}),
    spellings: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, str]:
    """Return the names that match a pattern, or raise an error with those that come nearest.

    If it matches none of them, `spellings` has other spellings of some, each with the name, and `aliases` those of
    names without the number of a call or a part. With each name comes the alias that matched, or the name again.

    >>> from elementgrad._names.names import match_names
    >>> list(match_names("h.*.weight", ["h.0.weight", "h.0.mlp.weight", "h.1.weight"]))
    ['h.0.weight', 'h.1.weight']
    >>> match_names("d.**.weight", ["dense_1/weight"], {"d.0.weight": "dense_1/weight"})
    {'dense_1/weight': 'd.0.weight'}
    """
    matcher, end = "", 0
    for wildcard in _WILDCARD.finditer(pattern):
        text = wildcard.group()
        matcher += re.escape(pattern[end : wildcard.start()])
        # With its separator, `**` may also stand for no component at all.
        matcher += "[^./]*" if text == "*" else ".*" if text[-1] == "*" else f"(?:.*{re.escape(text[-1])})?"
        end = wildcard.end()
    compiled = re.compile(matcher + re.escape(pattern[end:]))
    matches = {name: name for name in names if compiled.fullmatch(name)}
    if not matches and spellings:
        known = set(names)
        matches = {name: name for other, name in spellings.items() if name in known and compiled.fullmatch(other)}
    if not matches and aliases:
        for name in names:
            base, rest = _NAME.fullmatch(name).groups()  # type: ignore[union-attr]
            fitting = (alias + rest for alias, of in aliases.items() if of == base)
            alias = next(filter(compiled.fullmatch, fitting), None)
            if alias is not None:
                matches[name] = alias
    if not matches:
        raise PlaceError(f"no name matches {pattern!r}; {_nearest_names(pattern, [*names, *aliases])}")
    return matches


def _nearest_names(pattern: str, names: Sequence[str]) -> str:
    """Return the names that come nearest to a pattern, in which a component that is `*` fits any other."""
    wanted = _SEPARATOR.split(pattern)
    similar: dict[str, list[str]] = {}
    for name in names:
        parts = _SEPARATOR.split(name)
        if len(parts) == len(wanted):
            parts = ["*" if want == "*" else part for want, part in zip(wanted, parts, strict=True)]
        similar.setdefault("".join(parts), []).append(name)
    close = get_close_matches(pattern, similar, n=3)
    return (
        f"nearest: {listed([name for each in close for name in similar[each]])}" if close else nearest(pattern, names)
    )
