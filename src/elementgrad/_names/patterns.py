"""Patterns of names: `*` stays within one component of a name, and `**` crosses components."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any

from elementgrad._place.grammar import listed, nearest
from elementgrad._place.place import Place
from elementgrad.errors import PlaceError

_SEPARATOR = re.compile(r"([./])")
_WILDCARD = re.compile(r"\*\*[./]|\*+")
_NAME = re.compile(r"([^#:]*)(.*)")
"""A name without the number of a call or a part, and these."""


def is_pattern(name: str | None) -> bool:
    return name is not None and "*" in name


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

    >>> from elementgrad._names.patterns import match_names
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
