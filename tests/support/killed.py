"""A process whose children save patches and are killed at random moments; run by itself, for it forks.

`python -m tests.support.killed directory kills` prints how often each patch was found, and how often a save was
interrupted.
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

from elementgrad._train.bits import BitArray
from elementgrad._train.entries import Entry
from elementgrad._train.patch import Patch


def patch(value: float, size: int) -> Patch:
    old, new = (BitArray.of(np.full(size, number, np.float32)) for number in (0.0, value))
    return Patch((Entry("w[:]", "w", (size,), "float32", np.arange(size), new, old, "sample:" + 64 * "0"),))


def main(directory: str, kills: int) -> None:
    path = Path(directory, "patch.safetensors")
    patches = {"short": patch(1.0, 1_000), "long": patch(2.0, 30_000)}
    contents = {}
    for name, each in patches.items():
        each.write(path)
        contents[name] = path.read_bytes()
    start = time.perf_counter()
    for each in list(patches.values()) * 5:
        each.write(path)
    pair = (time.perf_counter() - start) / 5
    moments = random.Random(0)
    found = dict.fromkeys(patches, 0)
    for _ in range(kills):
        child = os.fork()
        if not child:
            for each in cycle(patches.values()):
                each.write(path)
        time.sleep(moments.uniform(0, 3 * pair))
        os.kill(child, signal.SIGKILL)
        assert os.WIFSIGNALED(os.waitpid(child, 0)[1]), "the child ended by itself"
        name = "short" if path.stat().st_size == len(contents["short"]) else "long"
        assert path.read_bytes() == contents[name]
        assert Patch.read(path) == patches[name]
        found[name] += 1
    print(json.dumps({"found": found, "left": sum(other.name.endswith(".tmp") for other in path.parent.iterdir())}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
