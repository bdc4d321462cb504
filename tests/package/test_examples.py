"""The examples run, with fewer steps, and show what they say they show."""

from importlib import util
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "examples"


@pytest.fixture
def run(capsys):
    """Runs an example here, in one thread as it does by itself, and gives what it printed, line by line."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)

    def run(name, *arguments):
        spec = util.spec_from_file_location(name, FOLDER / f"{name}.py")
        module = util.module_from_spec(spec)
        spec.loader.exec_module(module)
        failed = module.main(list(arguments))
        printed = capsys.readouterr().out
        assert not failed, printed
        assert "Warning" not in printed
        return module, [line.strip() for line in printed.splitlines()]

    yield run
    torch.set_num_threads(threads)


def test_a_new_token_is_taught_and_nothing_else_changes(run):
    module, lines = run("new_token", "--language-steps", "80", "--word-steps", "30")
    animals = set(module.KINDS["animal"])
    for start in (index for index, line in enumerate(lines) if line.startswith("random row")):
        rows = {line[:26].strip(): line[26:].split() for line in lines[start + 1 : start + 4]}
        before, after, known = map(float, rows["loss of what follows"])
        assert after < before
        assert after < known + 0.1
        assert int(rows["it eats, chews or smells"][1][:-1]) > 80
        near = {word.rstrip(",") for word in lines[start + 4].split()[-4:]}
        assert len(near & animals) >= 3
    assert lines.count("other elements of the model that moved: 0") == 2
    assert lines.count("of the other words: 0 of 1244160") == 2
    assert "of zebu itself: 0 of 23040" in lines
    for head in ("tied", "own"):
        assert f"{head} head: patched scores equal to the bit: True; undone to the bit: True" in lines


def test_sparse_fine_tuning_moves_the_chosen_elements_and_takes_them_back(run):
    pytest.importorskip("sklearn", reason="the digits come with scikit-learn, in the newest set of packages")
    _, lines = run("sparse_fine_tuning", "--steps", "20")
    table = {line[:26].strip(): [float(number) for number in line[26:].split()] for line in lines[1:17]}
    before, chosen = table["before"], table["10.0%, gradient"]
    assert chosen[0] > before[0] + 10
    assert 0 < chosen[2] <= 1835
    assert chosen[3] < table["all elements, rate 0.01"][3]


def test_new_tokens_are_taught_by_the_trainer_and_by_accelerate_alike(run):
    pytest.importorskip("accelerate", reason="Hugging Face's Trainer comes with the newest set of packages")
    _, lines = run("new_tokens_trainer", "--language-steps", "100", "--word-steps", "30")
    table = {line[:22].strip(): [float(number) for number in line[22:].split()] for line in lines[-7:-3]}
    for way in ("Trainer", "Accelerate"):
        for after, known in zip(table[way], table["words that it knew"], strict=True):
            assert after < known + 0.2
        assert table[way][1] < table["random rows"][1] - 1
    assert lines.count("other elements that moved, on all processes: 0") == 2
    assert lines.count("the one patch gives the trained model on every process: True; undone to the bit: True") == 2
    assert float(lines[-2].rpartition(" ")[2]) < 1e-4
