"""The package itself: what importing it loads, which module may import which, and what the command line prints."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import elementgrad as eg
from elementgrad._cli import main

ROOT = Path(__file__).parents[2]
SOURCE = Path(eg.__file__).parent
MODULES = sorted(set(SOURCE.rglob("*.py")) - set(SOURCE.glob("_tour/cells/*.py")))  # which are scripts
FRAMEWORKS = {"torch": "torch", "tensorflow": "tensorflow", "keras": "tensorflow", "jax": "jax"}
BELOW = {"_cleanup", "errors", "_place", "_names", "_sparsity", "_cone", "_backends"}
"""What backends may build on; all else builds on them."""
INTERFACES = {
    *("_read.backend", "_train.trainer", "_train.top_backend", "_train.kernels", "_train.bits"),
    *("_explain.backend", "_explain.trace", "_explain.kinds", "_explain.replay"),
    *("_explain.connect", "_explain.path", "_explain.provenance"),
    *("_audit.backend", "_watch.backend", "_watch.elements"),
}
"""What verbs own and backends implement or use."""
VERBS = {path.stem for path in SOURCE.iterdir() if path.suffix in ("", ".py")} - BELOW - {"__pycache__", "__init__"}
LEAVES = {"_show", "_cli", "_tour", "_explore"}


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
    heavy = "{'torch', 'tensorflow', 'jax', 'keras', 'rich', 'matplotlib', 'jinja2', 'starlette', 'elementgrad._show'}"
    code = f"import sys, elementgrad, elementgrad._read.api; print(sorted({heavy} & set(sys.modules)))"
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


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ("torch.__version__ = '2.7.1'", "torch 2.7.1 is not supported: elementgrad needs PyTorch 2.8 or newer; pip"),
        (
            "torch.__version__ = '3.0'; del torch._C._storage_Use_Count",
            "torch 3.0 is not supported: cannot import name",
        ),
    ],
)
def test_a_framework_that_is_too_old_or_unknown_gets_one_sentence_and_disturbs_no_other(change, why):
    code = f"""
import torch, jax.numpy, elementgrad as eg
{change}
print(eg.at(jax.numpy.ones(2))[0].set(3.0).tolist())
for use in (lambda: eg.at(torch.ones(2))[0].set(3.0), lambda: eg.trainable(torch.nn.Linear(2, 1), "weight[0, 0]")):
    try:
        use()
    except eg.FrameworkError as error:
        print(error)
"""
    other, *sentences = python(code).split("\n")
    assert other == "[3.0, 1.0]"
    assert len(sentences) == 2
    assert all(sentence.startswith(why) for sentence in sentences)


def test_the_floors_of_the_extras_are_those_that_the_backends_ask_for():
    floors = {name: re.escape(name) + r">=([\d.]+)" for name in ("torch", "tensorflow", "jax")}
    project = (ROOT / "pyproject.toml").read_text()
    for name, pattern in floors.items():
        floor = re.search(f'"{pattern}"', project)[1]
        compat = (SOURCE / "_backends" / name / "_compat.py").read_text()
        assert f"{floor} or newer" in compat


def test_the_readme_lists_the_versions_of_the_locks():
    table = (ROOT / "README.md").read_text()
    names = {"PyTorch": "torch", "TensorFlow": "tensorflow_cpu", "JAX": "jax", "NumPy": "numpy"}
    locks = [("oldest",), ("tour", "test"), ("newest",)]
    texts = ["".join((ROOT / "locks" / f"{name}.txt").read_text() for name in parts) for parts in locks]
    for title, package in names.items():
        pins = [re.search(rf"^{package}==(\S+)$", text, re.MULTILINE)[1] for text in texts]
        assert f"| {title} | {' | '.join(pins)} |" in table


def test_the_version_is_the_same_everywhere_and_has_its_section_in_the_changelog():
    (released,) = re.findall(r"^date-released: (.+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert f"\nversion: {eg.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## [{eg.__version__}] - {released}\n" in (ROOT / "CHANGELOG.md").read_text()


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
net, x = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Tanh()), torch.ones(2)
J = eg.jacobian(net, x)
J[0, :], J[:, 0], J.dense(), J.sparse(), eg.explain(net, x, of="output[0]"), eg.check(net, x)
with eg.record(x) as rec:
    y = x * 2
    y[0] = 3.0
rec.grad(eg.at(y)[1], eg.at(x)[1])
eg.trainable(net, "0.weight[0, 1]").release()
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
    home = inside[1] if inside[0] == "_backends" and len(inside) > 2 else None
    for name in imports(module):
        framework = FRAMEWORKS.get(name.split(".")[0])
        assert framework in (None, home), f"{module} imports {name}"


@pytest.mark.parametrize("module", MODULES, ids=lambda module: str(module.relative_to(SOURCE)))
def test_backends_import_no_verb_and_leaves_are_imported_by_none(module):
    for name in imports(module):
        parts = name.split(".")
        target = parts[1] if parts[0] == "elementgrad" and len(parts) > 1 else ""
        if room(module) == "_backends":
            assert target not in VERBS or ".".join(parts[1:3]) in INTERFACES or len(parts) == 2, (
                f"{module} imports {name}"
            )
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
    assert not {path.stem for path in SOURCE.iterdir()} & set(eg.__all__)


def test_every_error_is_one_of_ours_and_of_pythons():
    for name in eg.__all__:
        if name.endswith("Error"):
            assert issubclass(getattr(eg, name), eg.ElementgradError)
    assert issubclass(eg.SelectionError, IndexError)
    assert issubclass(eg.BroadcastError, ValueError)
    assert issubclass(eg.DtypeError, TypeError)


def test_the_command_line_says_its_version_and_refuses_what_it_does_not_know(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--version"])
    assert stopped.value.code == 0
    assert eg.__version__ in capsys.readouterr().out
    with pytest.raises(SystemExit) as stopped:
        main(["fly"])
    assert stopped.value.code == 2
