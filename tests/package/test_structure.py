"""The shape of the source: what keeps it easy to find things in."""

import ast
import inspect
import re
from collections import Counter
from graphlib import CycleError, TopologicalSorter
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
SELECTION = {"resolve", "flat", "coords"}
"""The public methods of `Selection`; the others serve the backends."""
RIDDLES = re.compile(r"(What|Who|Whose|Whether|Where|When|How|Why|Which)\b")


def test_a_class_name_exists_once():
    names = Counter(node.name for tree in TREES.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    assert [name for name, count in names.items() if count > 1] == []


def room(parts: tuple[str, ...]) -> str:
    """The folder or module of the package that a module is in; the backend of a framework is a room of its own."""
    framework = parts[0] == "_backends" and len(parts) > 1 and (SOURCE / "_backends" / parts[1]).is_dir()
    return "/".join(parts[: 2 if framework else 1])


def imported_modules(tree: ast.Module) -> set[tuple[str, ...]]:
    """All modules of ours that a module imports, also in functions, but for those that only types need."""
    unseen = [node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)]
    skipped = {inner for node in unseen for inner in ast.walk(node)}
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node not in skipped:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import) and node not in skipped:
            found |= {alias.name for alias in node.names}
    return {tuple(name.split(".")[1:]) for name in found if name.startswith("elementgrad.")}


def test_folders_do_not_import_each_other_in_a_circle():
    # The backend of a framework implements interfaces that verbs own (test_package.py says which), so that imports of
    # the backends themselves are not followed.
    graph: dict[str, set[str]] = {}
    for path, tree in TREES.items():
        here = room(path.relative_to(SOURCE).with_suffix("").parts)
        if here != "__init__" and "/" not in here:
            graph.setdefault(here, set()).update({room(module) for module in imported_modules(tree)} - {here})
    assert graph["_read"] >= {"_backends", "_place", "_names"}
    try:
        list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_docstrings_begin_with_a_verb_or_a_noun(path):
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    docstrings = [ast.get_docstring(node) or "" for node in ast.walk(TREES[path]) if isinstance(node, documented)]
    assert [docstring for docstring in docstrings if RIDDLES.match(docstring)] == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_a_folder_says_what_each_of_its_files_is_for(path):
    home = path.parent / "__init__.py"
    if path.parent == SOURCE or path == home:
        return
    text = ast.get_docstring(TREES[home]) or ""
    if path.parent.parent == SOURCE / "_backends":  # all frameworks have the same files, and one text about them
        text += ast.get_docstring(TREES[SOURCE / "_backends" / "__init__.py"]) or ""
    main_file = path.stem.lstrip("_").partition("_")[0]  # `watch_run.py` is a part of `watch.py`
    assert path.stem in text or main_file in text


def test_no_file_is_too_long_to_read():
    assert [str(path) for path in FILES if len(path.read_text().splitlines()) > 700] == []


def test_the_interface_of_backends_is_small():
    methods = [name for name, value in vars(Backend).items() if inspect.isfunction(value) and name[:2] != "__"]
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


def test_public_functions_list_their_arguments():
    for name in eg.__all__:
        value = getattr(eg, name)
        members = {name: value} if inspect.isfunction(value) else {}
        if inspect.isclass(value):
            keys = [key for key in vars(value) if key[0] != "_" and (name != "Selection" or key in SELECTION)]
            members = {f"{name}.{key}": inspect.getattr_static(value, key) for key in keys}
        for label, member in members.items():
            function = getattr(member, "__func__", member)
            if not inspect.isfunction(function) or not function.__doc__ or name.endswith("Error"):
                continue
            parameters = [key for key in inspect.signature(function).parameters if key not in ("self", "cls")]
            assert len(parameters) < 2 or "Args:" in function.__doc__, label
