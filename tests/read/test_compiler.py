"""What waits for `torch.compile` is told once, when it is imported and not before."""

import importlib.util
import sys
from importlib import import_module
from importlib.machinery import PathFinder

import pytest

from elementgrad._backends.torch import tensor as compiler

NAME = "compiler_of_a_test"


@pytest.fixture
def waiting(tmp_path, monkeypatch):
    """A module in place of the compiler, and what was told when it was imported."""
    (tmp_path / f"{NAME}.py").write_text("ready = True\n")
    monkeypatch.setattr(compiler, "COMPILER", NAME)
    monkeypatch.setattr(compiler, "_waiting", [])
    monkeypatch.setattr(sys, "meta_path", [PathFinder])  # pytest's own finder would be the loader of every module
    monkeypatch.syspath_prepend(tmp_path)
    told = []
    compiler.once_imported(lambda: told.append(sys.modules[NAME].ready))
    yield told
    sys.modules.pop(NAME, None)


def assert_told_once(told):
    assert told == []
    import_module(NAME)
    assert told == [True]
    assert not any(isinstance(finder, compiler._CompilerFinder) for finder in sys.meta_path)


def test_importing_it_tells(waiting):
    assert_told_once(waiting)


def test_a_look_whether_it_is_there_leaves_it_to_be_told(waiting):
    assert importlib.util.find_spec(NAME) is not None
    assert_told_once(waiting)


def test_an_import_that_fails_leaves_it_to_be_told(waiting, tmp_path):
    file = tmp_path / f"{NAME}.py"
    good = file.read_text()
    file.write_text("raise ZeroDivisionError")
    with pytest.raises(ZeroDivisionError):
        import_module(NAME)
    file.write_text(good + "# of another length, so that it is compiled again\n")
    assert_told_once(waiting)


def test_where_it_is_imported_already_it_is_told_at_once(waiting):
    import_module(NAME)
    compiler.once_imported(lambda: waiting.append("now"))
    assert waiting == [True, "now"]
