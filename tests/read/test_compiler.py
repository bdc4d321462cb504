"""`once_imported` runs a call when the compiler of PyTorch is imported, once and not before."""

import importlib.util
import sys
from importlib import import_module
from importlib.machinery import PathFinder

import pytest

from elementgrad._backends.torch import tensor as compiler

NAME = "compiler_of_a_test"


@pytest.fixture
def waiting(tmp_path, monkeypatch):
    """Put a module in place of the compiler; return a list that the waiting call appends to."""
    (tmp_path / f"{NAME}.py").write_text("ready = True\n")
    monkeypatch.setattr(compiler, "COMPILER", NAME)
    monkeypatch.setattr(compiler, "_waiting", [])
    monkeypatch.setattr(sys, "meta_path", [PathFinder])  # pytest's own finder would be the loader of every module
    monkeypatch.syspath_prepend(tmp_path)
    calls = []
    compiler.once_imported(lambda: calls.append(sys.modules[NAME].ready))
    yield calls
    sys.modules.pop(NAME, None)


def assert_runs_once(calls):
    assert calls == []
    import_module(NAME)
    assert calls == [True]
    assert not any(isinstance(finder, compiler._CompilerFinder) for finder in sys.meta_path)


def test_an_import_runs_the_waiting_call(waiting):
    assert_runs_once(waiting)


def test_find_spec_does_not_run_the_waiting_call(waiting):
    assert importlib.util.find_spec(NAME) is not None
    assert_runs_once(waiting)


def test_a_failed_import_does_not_run_the_waiting_call(waiting, tmp_path):
    file = tmp_path / f"{NAME}.py"
    good = file.read_text()
    file.write_text("raise ZeroDivisionError")
    with pytest.raises(ZeroDivisionError):
        import_module(NAME)
    file.write_text(good + "# of another length, so that it is compiled again\n")
    assert_runs_once(waiting)


def test_an_earlier_import_runs_the_call_at_once(waiting):
    import_module(NAME)
    compiler.once_imported(lambda: waiting.append("now"))
    assert waiting == [True, "now"]
