"""A process whose children patch weights and are killed at random moments; run by itself, for it forks.

`python -m tests.support.killed_weights directory kills file|folder|diff` prints how often the old and the new weights
were found, and how often a kill left something behind.
"""

import json
import os
import random
import signal
import sys
import time
from itertools import cycle
from pathlib import Path

import numpy as np

import elementgrad as eg
from elementgrad._train.api import apply_to_path
from elementgrad._train.folder import read_weights
from elementgrad._train.weights import FileTensor, Weights

SHARDS = 4


def content(path):
    """The bytes of all tensors."""
    return {name: tensor.read().tobytes() for name, tensor in read_weights(path).tensors.items()}


def write_folder(folder, state):
    folder.mkdir()
    files = {name: f"model-{at % SHARDS + 1:05}-of-{SHARDS:05}.safetensors" for at, name in enumerate(state)}
    for file in files.values():
        Weights({name: FileTensor.of(state[name]) for name in state if files[name] == file}).write(folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))


def main(directory: str, kills: int, kind: str) -> None:
    random_numbers = np.random.default_rng(0)
    old = {f"w{at}": random_numbers.normal(size=(200, 100)).astype(np.float32) for at in range(2 * SHARDS)}
    new = {name: np.where(array > 1, array + 1, array) for name, array in old.items()}
    path = Path(directory, "checkpoint" if kind == "folder" else "weights.safetensors")
    patch = eg.diff(old, new)
    if kind == "diff":
        path = path.with_name("patch.safetensors")
        patches = [patch, eg.diff(new, old)]
        states = [eg.Patch(each.entries) for each in patches]
        steps = [lambda: eg.diff(old, new, path), lambda: eg.diff(new, old, path)]
        look = eg.inspect
        steps[0]()
    else:
        if kind == "folder":
            write_folder(path, old)
        else:
            Weights({name: FileTensor.of(array) for name, array in old.items()}).write(path)
        states = [content(path), {name: array.tobytes() for name, array in new.items()}]
        steps = [lambda: apply_to_path(path, [patch]), lambda: apply_to_path(path, [patch], undo=True)]
        look = content
    start = time.perf_counter()
    steps[0]()
    steps[1]()
    pair = time.perf_counter() - start
    if kind == "diff":
        steps[0]()
    moments, found, left = random.Random(0), [0, 0], 0
    for _ in range(kills):
        at = states.index(look(path))
        child = os.fork()
        if not child:
            for step in cycle(steps[at:] + steps[:at]) if kind != "diff" else cycle(steps[::-1] if at == 0 else steps):
                step()
        time.sleep(moments.uniform(0, 2 * pair))
        os.kill(child, signal.SIGKILL)
        assert os.WIFSIGNALED(os.waitpid(child, 0)[1]), "the child ended by itself"
        found[states.index(look(path))] += 1
        inside = path if kind == "folder" else path.parent
        left = max(left, len(list(inside.iterdir())) - (SHARDS + 1 if kind == "folder" else 1))
    print(json.dumps({"found": found, "left": left}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
