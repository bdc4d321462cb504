"""Every console block of the documentation prints what it says."""

import doctest
import io
import re
import shlex
from contextlib import redirect_stderr, redirect_stdout

import pytest
import torch

import elementgrad as eg
from elementgrad._cli import main
from tests.package.test_docs import PAGES, blocks

CONSOLE = re.compile(r"^```console\n(.*?)^```", re.MULTILINE | re.DOTALL)
NAMED = re.compile(r"# (\w+\.py)\n")
FLAGS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS


@pytest.mark.parametrize(
    "page", [page for page in PAGES if CONSOLE.search(page.read_text())], ids=lambda page: page.name
)
def test_the_commands_of_a_page_print_what_it_says(page, tmp_path, monkeypatch):
    """A Python block that begins with the name of a file is that file; `...` stands for anything."""
    monkeypatch.chdir(tmp_path)
    for _, block in blocks(page):
        if named := NAMED.match(block):
            (tmp_path / named[1]).write_text(block)
    a_patch(tmp_path)
    code = None
    for block in CONSOLE.findall(page.read_text()):
        for entry in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            typed, _, says = entry.partition("\n")
            command, *arguments = shlex.split(typed)
            printed = io.StringIO()
            if typed == "echo $?":
                print(code, file=printed)
            else:
                assert command == "elementgrad"
                with redirect_stdout(printed), redirect_stderr(printed):
                    code = main(arguments)
            assert doctest.OutputChecker().check_output(says, printed.getvalue(), FLAGS), (
                f"{typed}\n{printed.getvalue()}"
            )


def a_patch(folder):
    """Weights and a patch, as a user has them."""
    from safetensors.torch import save_file

    model = torch.nn.Linear(3, 2)
    save_file(model.state_dict(), folder / "weights.safetensors")
    elements = eg.trainable(model, "weight[1, 2]")
    with torch.no_grad():
        elements["weight[1, 2]"].add_(0.5)
    elements.save(folder / "patch.safetensors")
