"""The package itself: what importing it loads, which module may import which, and what the command line prints."""

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import elementgrad as eg
from elementgrad.cli import main, tour

SOURCE = Path(eg.__file__).parent
MODULES = sorted(SOURCE.rglob("*.py"))
FRAMEWORKS = {"torch": "torch", "tensorflow": "tensorflow", "keras": "tensorflow", "jax": "jax"}
BELOW = {"errors", "index", "selection", "resolve", "text", "tree", "sparsity", "backends"}
"""What backends may build on; all else builds on them."""
VERBS = {path.stem for path in SOURCE.iterdir() if path.suffix in ("", ".py")} - BELOW
LEAVES = {"show", "cli"}


def imports(module: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def room(module: Path) -> str:
    return module.relative_to(SOURCE).with_suffix("").parts[0]


def python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_importing_elementgrad_imports_no_framework_and_nothing_to_show_with():
    heavy = "{'torch', 'tensorflow', 'jax', 'keras', 'rich', 'matplotlib', 'jinja2', 'elementgrad.show'}"
    code = f"import sys, elementgrad, elementgrad.read; print(sorted({heavy} & set(sys.modules)))"
    assert python(code) == "[]"


def test_using_places_imports_no_framework():
    code = """
import sys, numpy, elementgrad as eg
str(eg.at("conv1")[0, [1, 2]]), eg.at("conv1[0]").select(shape=(3,)).flat()
try:
    eg.at(numpy.ones(3))
except eg.FrameworkError:
    print(sorted({'torch', 'tensorflow', 'jax', 'keras'} & set(sys.modules)))
"""
    assert python(code) == "[]"


def test_a_tensor_finds_its_backend_whichever_was_imported_first():
    code = "from elementgrad import at; import torch; print(at(torch.ones(2))[0].set(3.0).tolist())"
    assert python(code) == "[3.0, 1.0]"


def test_a_framework_that_cannot_be_imported_disturbs_no_other():
    code = """
import sys
sys.modules["tensorflow"] = None
import torch, elementgrad as eg
print(eg.at(torch.ones(2))[0].set(3.0).tolist())
"""
    assert python(code) == "[3.0, 1.0]"


def test_the_first_edit_may_stand_inside_a_compiled_function():
    code = """
import torch, elementgrad as eg
step = torch.compile(lambda x: eg.at(x)[1].set(3.0) * 2, fullgraph=True, backend="aot_eager")
print(step(torch.ones(2)).tolist(), step(torch.ones(2)).tolist())
"""
    assert python(code) == "[2.0, 6.0] [2.0, 6.0]"


def test_the_compiler_is_not_imported_for_us_and_knows_our_functions_when_it_is():
    code = """
import sys, torch, elementgrad as eg
eg.at(torch.ones(2))[0].set(1.0)
print("torch._dynamo" in sys.modules)
f = lambda x: eg.choose(eg.at(x)[torch.tensor([1])].set(3.0), x, hard=True)
whole = torch.compile(f, fullgraph=True, backend="eager")
apart = torch.compile(lambda x: eg.grad(lambda y: (y**2).sum(), x) + 1, backend="eager")
print(whole(torch.tensor([1.0, 2.0])).item(), apart(torch.ones(2)).tolist())
"""
    assert python(code).split("\n") == ["False", "3.0 [3.0, 3.0]"]


@pytest.mark.parametrize("module", MODULES, ids=lambda module: str(module.relative_to(SOURCE)))
def test_only_its_backend_imports_a_framework(module):
    inside = module.relative_to(SOURCE).parts
    home = inside[1] if inside[0] == "backends" and len(inside) > 2 else None
    for name in imports(module):
        framework = FRAMEWORKS.get(name.split(".")[0])
        assert framework in (None, home), f"{module} imports {name}"


@pytest.mark.parametrize("module", MODULES, ids=lambda module: str(module.relative_to(SOURCE)))
def test_backends_import_no_verb_and_leaves_are_imported_by_none(module):
    for name in imports(module):
        parts = name.split(".")
        target = parts[1] if parts[0] == "elementgrad" and len(parts) > 1 else ""
        if room(module) == "backends":
            assert target not in VERBS, f"{module} imports {name}"
        if target in LEAVES:  # the package itself resolves its names when they are first used
            assert room(module) in (*LEAVES, "__main__", "__init__"), f"{module} imports {name}"


def test_public_names_are_those_listed_and_carry_docstrings():
    assert {"at", "choose", "Place", "Selection", "ElementgradError"} <= set(eg.__all__)
    for name in eg.__all__:
        assert getattr(eg, name).__doc__, name
    assert set(dir(eg)) == set(eg.__all__)
    with pytest.raises(AttributeError, match="no attribute 'missing'"):
        eg.missing  # noqa: B018


def test_no_module_bears_the_name_of_a_public_function():
    """Importing such a module would put it in the function's place."""
    assert not {module.stem for module in MODULES} & set(eg.__all__)


def test_every_error_is_one_of_ours_and_of_pythons():
    for name in eg.__all__:
        if name.endswith("Error"):
            assert issubclass(getattr(eg, name), eg.ElementgradError)
    assert issubclass(eg.SelectionError, IndexError)
    assert issubclass(eg.BroadcastError, ValueError)
    assert issubclass(eg.DtypeError, TypeError)


TOUR = {
    "replace_an_element": ["[1, 2, 10, 4]", "[1, 1, 0, 1]", "1"],
    "replace_and_square": ["78", "[0, 4, 6, 8]", "14"],
    "one_element_alone": ["[0, 0, 6, 0]"],
    "one_step_on_one_element": ["[1, 1.6, 3, 4]"],
    "the_published_answer": ["[0.8, 2, 2.4, 3.2]"],
    "three_ways_to_element_zero": ["[6, 0, 0]", "[6, 0, 0]", "[6, 0, 0]"],
    "element_zero_alone": ["[6, 0, 0]"],
    "the_message_about_element_zero": [
        "element 0 of tensors does not require grad and does not have a grad_fn",
        "detached",
        "leave detach out, or apply it only where no gradient is wanted",
    ],
    "bad_numbers_stay_away": ["nan", "[0, 4]"],
    "element_of_a_product": ["[[5, 7], [0, 0]]", "7"],
    "element_of_itself": ["[[0, 0, 0], [0, 0, 1], [0, 0, 0]]", "[[1, 1, 1], [1, 1, 1], [1, 1, 1]]"],
    "used_twice": ["[2, 1]", "3"],
    "inside_one_tensor": ["111"],
    "logit_to_neuron": ["0.2097", "0.1837"],
    "function_with_an_index": ["4"],
    "asked_twice": ["6", "6"],
    "one_second_derivative": ["8", "[2, 6]"],
    "train_one_entry": ["[[0, 5]]", "0"],
    "the_usual_mask": ["999", "999"],
}


SEEN = {
    "a_learned_choice": "1",  # what was learned
    "feature_to_pixel": "················ ················ ▒▒▒▒░░░░░░······ ░░▒▒▓▓▒▒░░······ ░░░░██░░░░······",
    "a_few_entries_of_many": "[0, 0.42, 0.7616, 0]",
    "an_entry_of_a_sequence_model": "[0]",
    "why_is_it_zero": "the input does not contain that index",
    "each_entry_its_loss": "[0.01656, 0.04524]",
}


ELSEWHERE = {
    "replace_an_element": TOUR["replace_an_element"],
    "replace_and_square": TOUR["replace_and_square"],
    "one_element_alone": TOUR["one_element_alone"],
    "one_step_on_one_element": TOUR["one_step_on_one_element"],
    "the_published_answer": TOUR["the_published_answer"],
    "element_of_a_product": TOUR["element_of_a_product"],
    "the_usual_mask": ["999"],
}
"""What the stops give on the other frameworks that have the same."""
TRAINED = {"tensorflow": ["[[0, 5]]", "0"], "jax": ["[[0, 5]]", "[]"]}
STOPS = [
    pytest.param(framework, stop, id=f"{framework} {stop.__name__}")
    for framework in tour.NEEDS
    for stop in import_module(f"elementgrad.cli.stops.on_{framework}").STOPS
]


def shown(value):
    return " ".join(tour.show(value).replace("\\[", "[").split())


@pytest.mark.parametrize(("framework", "stop"), STOPS)
def test_every_stop_of_the_tour_gives_its_founding_numbers_by_the_code_that_it_shows(framework, stop):
    names = dict(vars(tour.on(framework)))
    given = stop()
    answers = [shown(value) for value in given.values()]
    exec(tour.source(stop), names)
    assert [shown(eval(expression, names)) for expression in given] == answers
    known = TOUR if framework == "torch" else ELSEWHERE | {"train_one_entry": TRAINED[framework]}
    if stop.__name__ in known:
        assert answers == known[stop.__name__]
    elif framework == "torch":
        assert SEEN[stop.__name__] in answers[-1]
    elif stop.__name__ == "an_entry_of_a_sequence_model":
        assert answers[-1] == "[0]" != answers[0]
    else:
        assert stop.__name__ == "each_entry_its_loss"
        assert answers[0] != answers[1]


def test_the_tour_prints_its_stops(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    assert main(["tour"]) == 0
    printed = capsys.readouterr().out
    for answer in (
        "[1, 2, 10, 4]",
        "[1, 1, 0, 1]",
        "78",
        "[0, 4, 6, 8]",
        "14",
        "[0, 0, 6, 0]",
        "[1, 1.6, 3, 4]",
        "[6, 0, 0]",
    ):
        assert answer in printed
    assert "eg.at(v)[2].set(value)" in printed


def test_the_command_line_says_its_version_and_refuses_what_it_does_not_know(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--version"])
    assert stopped.value.code == 0
    assert eg.__version__ in capsys.readouterr().out
    with pytest.raises(SystemExit) as stopped:
        main(["fly"])
    assert stopped.value.code == 2


def test_the_tour_says_what_it_lacks(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "rich", None)
    assert main(["tour"]) == 2
    assert capsys.readouterr().err == "elementgrad: the tour needs rich; pip install 'elementgrad[show]'\n"
