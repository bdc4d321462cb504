"""The shape of the source: what keeps it easy to find things in."""

import ast
import inspect
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

import elementgrad as eg
from elementgrad._backends.base import Backend

SOURCE = Path(eg.__file__).parent
FILES = sorted(path for path in SOURCE.rglob("*.py") if "cells" not in path.parts)
TREES = {path: ast.parse(path.read_text()) for path in FILES}
PRIVATE = re.compile(
    r"(?!torch\.ops)(torch|jax|keras|tensorflow)(\.\w+)*\.(_[a-z]\w*|_C)\b"
    r"|(tensorflow\.python|keras\.src|jax\.interpreters)\b"
)
"""Names of a framework that it may change without notice."""


def runtime_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a module that run; imports for type checkers alone do not."""
    todo = [tree]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        yield node
        todo.extend(ast.iter_child_nodes(node))


def folder_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def test_a_class_name_exists_once():
    names = Counter(node.name for tree in TREES.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    assert [name for name, count in names.items() if count > 1] == []


def test_no_file_is_too_long_to_read():
    assert [str(path) for path in FILES if len(path.read_text().splitlines()) > 700] == []


def test_the_interface_of_backends_is_small():
    methods = [name for name, value in vars(Backend).items() if inspect.isfunction(value)]
    assert len(methods) <= 30


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_private_names_of_frameworks_are_imported_in_one_file_of_each_backend(path):
    if path.name == "_compat.py":
        return
    found = []
    for node in ast.walk(TREES[path]):
        if isinstance(node, ast.Attribute):
            found += [ast.unparse(node)] if PRIVATE.match(ast.unparse(node)) else []
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += [name for name in (f"{node.module}.{alias.name}" for alias in node.names) if PRIVATE.match(name)]
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if PRIVATE.match(alias.name)]
    assert found == []


def test_folders_import_each_other_in_one_direction():
    """Backends import the interfaces that verbs own, which import nothing back but interfaces of the backends."""
    needs: dict[str, set[str]] = defaultdict(set)
    for path, tree in TREES.items():
        folder = folder_of(path)
        for node in runtime_nodes(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("elementgrad._"):
                other = (node.module or "").split(".")[1]
                if other != folder and "_backends" != folder != "__init__":
                    needs[folder].add(other)
    order: list[str] = []
    while needs:
        free = sorted(folder for folder, others in needs.items() if not others & needs.keys())
        assert free, f"folders that import each other: {dict(needs)}"
        order += free
        for folder in free:
            del needs[folder]
    assert order[-1] in ("_cli", "__main__")


def test_public_functions_list_their_arguments():
    for name in eg.__all__:
        value = getattr(eg, name)
        members = {name: value} if inspect.isfunction(value) else {}
        if inspect.isclass(value):
            members = {f"{name}.{key}": inspect.getattr_static(value, key) for key in vars(value) if key[0] != "_"}
        for label, member in members.items():
            function = getattr(member, "__func__", member)
            if not inspect.isfunction(function) or not function.__doc__:
                continue
            parameters = [key for key in inspect.signature(function).parameters if key not in ("self", "cls")]
            assert len(parameters) < 2 or "Args:" in function.__doc__, label
