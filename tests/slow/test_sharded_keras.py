"""Elements of Keras models under `tf.distribute` strategies, in real processes: see the checks that these run."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import elementgrad
from tests.support import sharded_keras_mirrored, sharded_keras_workers
from tests.support.shared import once

HERE = Path(__file__).parents[2]
SOURCE = Path(elementgrad.__file__).parent.parent


def launched(module, folder, **environment):
    paths = os.pathsep.join(map(str, (SOURCE, HERE)))
    variables = os.environ | {"PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"} | environment
    command = [sys.executable, "-m", module.__name__, str(folder)]
    return subprocess.Popen(command, cwd=HERE, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def outcomes(processes):
    """Return what each process reports of its checks; all are stopped once one fails."""
    try:
        printed = [process.communicate(timeout=300) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, errors) in zip(processes, printed, strict=True):
        assert process.returncode == 0, errors
    return [json.loads(output.splitlines()[-1]) for output, _ in printed]


def read_outcomes(folder):
    return json.loads((folder / "outcomes.json").read_text())


def launch_mirrored(folder):
    (folder / "outcomes.json").write_text(json.dumps(outcomes([launched(sharded_keras_mirrored, folder)])))


def launch_workers(folder):
    held = [socket.socket() for _ in range(2)]
    for each in held:
        each.bind(("localhost", 0))
    addresses = [f"localhost:{each.getsockname()[1]}" for each in held]
    for each in held:
        each.close()
    tasks = [{"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}} for index in range(2)]
    both = [launched(sharded_keras_workers, folder, TF_CONFIG=json.dumps(task)) for task in tasks]
    (folder / "outcomes.json").write_text(json.dumps(outcomes(both)))


@pytest.fixture(scope="module")
def mirrored(tmp_path_factory):
    """One process with two virtual devices."""
    return read_outcomes(once(tmp_path_factory, "mirrored", launch_mirrored))


@pytest.fixture(scope="module")
def workers(tmp_path_factory):
    """Two processes."""
    return read_outcomes(once(tmp_path_factory, "workers", launch_workers))


@pytest.mark.parametrize("check", [check.__name__ for check in sharded_keras_mirrored.CHECKS])
def test_under_a_mirrored_strategy(mirrored, check):
    assert [outcome[check] for outcome in mirrored] == ["ok"]


@pytest.mark.parametrize("check", [check.__name__ for check in sharded_keras_workers.CHECKS])
def test_in_several_processes(workers, check):
    assert [outcome[check] for outcome in workers] == ["ok", "ok"]
