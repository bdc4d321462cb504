"""Elements of JAX parameters that are spread over devices and processes, each launched once for all checks."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.shared import once

ROOT = Path(__file__).parents[2]
ON_A_MESH = (
    "training, batch over 2",
    "training, parameters over 4",
    "training, parameters over 2 by 2",
    "wire, batch over 4",
    "wire, parameters over 4",
    "wire, batch over 2, parameters over 2",
    "gradients",
    "patches",
    "by hand",
    "reads inside",
    "largest",
    "explicit axes",
)
IN_TWO_PROCESSES = (
    "training, batch over 4",
    "training, batch over 2, parameters over 2",
    "training, parameters over 2 by 2",
    "patches, parameters over 2 by 2",
    "patches, batch over 2, parameters over 2",
    "disagreeing",
    "largest",
)
TOKENS = 8


def launched(module: str, devices: int, *arguments: object) -> subprocess.Popen:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}",
        "JAX_PLATFORMS": "cpu",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", f"tests.support.{module}", *map(str, arguments)]
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def outcomes_of(process: subprocess.Popen) -> dict[str, dict]:
    try:
        printed, errors = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 0, errors
    return json.loads(printed.splitlines()[-1])


def launch_one(folder: Path) -> None:
    (folder / "outcomes.json").write_text(json.dumps(outcomes_of(launched("sharded_jax", 4, folder))))


def launch_two(folder: Path) -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    both = [launched("sharded_jax_process", 2, number, port, folder) for number in range(2)]
    try:
        (folder / "outcomes.json").write_text(json.dumps([outcomes_of(process) for process in both]))
    finally:
        for process in both:  # the other waits for one that failed
            process.kill()


@pytest.fixture(scope="module")
def mesh(tmp_path_factory):
    return json.loads((once(tmp_path_factory, "mesh", launch_one) / "outcomes.json").read_text())


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    return json.loads((once(tmp_path_factory, "processes", launch_two) / "outcomes.json").read_text())


@pytest.mark.parametrize("check", ON_A_MESH)
def test_on_a_mesh(mesh, check):
    if check == "explicit axes" and check not in mesh:
        pytest.skip("this version of JAX has no explicit axes")
    assert mesh[check]["wrong"] is None, mesh[check]["wrong"]


def test_only_the_elements_go_over_the_wire(mesh):
    wire = {check: mesh[check]["found"] for check in ON_A_MESH if check.startswith("wire")}
    elements = wire["wire, batch over 4"]["elements"]
    by_hand, checked = mesh["by hand"]["found"]
    assert by_hand == 4 * elements
    assert checked <= 8 * elements
    for check, found in wire.items():
        more = found["step"] - found["frozen"]
        numbers = 2 * found["elements"] if "parameters" not in check else TOKENS * found["elements"]
        assert 0 < more <= 4 * numbers, (check, found)


@pytest.mark.parametrize("check", IN_TWO_PROCESSES)
def test_in_two_processes(processes, check):
    for one in processes:
        assert one[check]["wrong"] is None, one[check]["wrong"]
    first, second = [one[check]["found"] for one in processes]
    assert first == second  # to the bit
