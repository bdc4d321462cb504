"""Scripts that tests start: a driver that is killed in the middle, and one on MPI that prints what it found as JSON."""

import json
import os
import sys
import threading
import time

if __name__ == "__main__":
    import numpy as np
    import torch

    import elementgrad as eg
    from tests.support.distributed_functions import Fit, arguments, net, watched

    torch.set_num_threads(1)


def killed(out: str, log: str) -> None:
    """Write a Jacobian by two workers, and end without a word once some of it is there."""
    import multiprocessing
    import signal
    from concurrent.futures import ProcessPoolExecutor
    from pathlib import Path

    def watch() -> None:
        while sum(1 for _ in Path(out).glob("c/*/0")) < 5:
            time.sleep(0.005)
        os.kill(os.getpid(), signal.SIGKILL)

    J = eg.jacobian(Fit(watched(log, pause=0.02)), *arguments(), wrt="x", budget=5_000)
    threading.Thread(target=watch, daemon=True).start()
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        J.dense(executor=pool, out=out)


def mpi(out: str) -> None:
    """Everything once on ranks of MPI."""
    from mpi4py.futures import MPIPoolExecutor

    found = {}
    with MPIPoolExecutor() as pool:
        J = eg.jacobian(watched(), *arguments(), wrt="x", budget=5_000)
        found["function"] = torch.equal(J.dense(executor=pool), J.dense())
        model, x = net()
        K = eg.jacobian(model, x, of="output", wrt="0.weight", budget=5_000)
        found["model"] = torch.equal(K.dense(executor=pool), K.dense())
        found["stored"] = bool(np.array_equal(J.dense(executor=pool, out=out)[:], J.dense().numpy()))
        found["processes"] = len(set(pool.map(_process, range(20)))) + 1
    print(json.dumps(found))


def _process(_: int) -> int:
    time.sleep(0.02)
    return os.getpid()


if __name__ == "__main__":
    {"killed": killed, "mpi": mpi}[sys.argv[1]](*sys.argv[2:])
