"""Reading the user's code: where a tensor came from, where nothing recorded how it was computed.

A tensor from before a training step may be a slice of another one, and its numbers do not tell: all slices of zeros are
equal. The code around the step does: the two tensors have names there, and one is assigned from the other.
"""

import ast
import inspect
import linecache
from collections.abc import Callable, Iterator
from types import FunctionType, MethodType
from typing import Any

Binding = tuple[ast.AST, ast.AST]
"""The targets of an assignment or a loop, and the expression that they are assigned from."""


def is_assigned_from(
    function: Any, value: Any, origin: Any, same: Callable[[Any, Any], bool] = lambda x, y: x is y
) -> bool | None:
    """Return True if the code around `function` computes `value` from `origin`, False if from something else.

    Names count only if the function sees the two objects under them. Return None if they have no names there, or if
    there is no source code.
    """
    function = inspect.unwrap(getattr(function, "python_function", function))
    pairs = list(_names_around(function))
    values = {name for name, each in pairs if same(each, value)}
    derived = {name for name, each in pairs if same(each, origin)}
    code = getattr(function, "__code__", None)
    bindings = list(_bindings_around(code.co_filename, code.co_firstlineno)) if code is not None else []
    if not derived or not any(not values.isdisjoint(_identifiers(targets)) for targets, _ in bindings):
        return None
    for _ in bindings:  # by way of other names, in whatever order they are assigned
        known = len(derived)
        for targets, expression in bindings:
            if not derived.isdisjoint(_identifiers(expression)):
                derived |= _identifiers(targets)
        if len(derived) == known:
            break
    return not derived.isdisjoint(values)


def _names_around(function: Any) -> Iterator[tuple[str, Any]]:
    """Yield the names that a function sees outside of itself, and those of the functions of the same file it calls."""
    queue, seen = [function], set[int]()
    while queue:
        each = queue.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, MethodType):
            yield from getattr(each.__self__, "__dict__", {}).items()
        try:
            names = inspect.getclosurevars(each)
        except (TypeError, ValueError):  # it is not written in Python, or uses a name that has no value yet
            continue
        for name, value in {**names.globals, **names.nonlocals}.items():
            yield name, value
            if isinstance(value, FunctionType) and value.__code__.co_filename == function.__code__.co_filename:
                queue.append(value)


def _bindings_around(filename: str, line: int) -> Iterator[Binding]:
    """Yield the assignments of the outermost function or class around a line, and those of the module itself."""
    try:
        module = ast.parse("".join(linecache.getlines(filename)))
    except (SyntaxError, ValueError):
        return
    for statement in module.body:
        nested = isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
        if nested and not statement.lineno - 1 <= line <= (statement.end_lineno or line):
            continue
        for node in ast.walk(statement):
            if isinstance(node, ast.Assign):
                yield from ((target, node.value) for target in node.targets)
            elif isinstance(node, (ast.AnnAssign, ast.NamedExpr)) and node.value is not None:
                yield node.target, node.value
            elif isinstance(node, (ast.For, ast.comprehension)):
                yield node.target, node.iter


def _identifiers(node: ast.AST) -> set[str]:
    names = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
    return names | {each.attr for each in ast.walk(node) if isinstance(each, ast.Attribute)}
