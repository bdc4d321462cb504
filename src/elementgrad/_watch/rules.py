"""The rules of `eg.watch(when=...)`: places, and functions of the gradient there."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from elementgrad._names.arguments import option_error
from elementgrad._place.place import Place, parse_place
from elementgrad._watch.backend import Rule
from elementgrad.errors import OptionError, quoted

NONFINITE = "nonfinite"


def parse_rules(when: Any) -> dict[str, tuple[Place, Rule]]:
    """Return the rules by the text of their places; numbers that are not finite are looked for in any case."""
    if isinstance(when, str) and when == NONFINITE:
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
