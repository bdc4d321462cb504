"""A watched run on two processes: all of them stop at the fault of one, which writes the capture."""

import json
import os
import socket
import subprocess
import sys

import pytest


@pytest.mark.parametrize("fault", ["batch", "gradient", "scaled parameter", "none"])
def test_every_process_stops_and_one_writes(fault, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = []
    for rank in range(2):
        rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": "2"}
        command = [sys.executable, "-m", "tests.support.watched_ranks", str(tmp_path), fault]
        environment = {**os.environ, **rendezvous, "OMP_NUM_THREADS": "1"}
        processes.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    found = [json.loads(process.communicate(timeout=120)[0].splitlines()[-1]) for process in processes]
    if fault == "none":
        assert found == [None, None]
        return
    assert [each["step"] for each in found] == [2, 2]
    assert [each["ran"] for each in found] == [2, 2]
    assert [each["rank"] for each in found] == [1, 1]
    cause, place = {
        "batch": ("bad-input", "x[1, 2]"),
        "gradient": ("singular", "sub[0, 0]"),
        "scaled parameter": ("bad-parameter", "inner.weight[0, 1]"),
    }[fault]
    assert {(each["cause"], each["place"]) for each in found} == {(cause, place)}
    assert os.listdir(tmp_path) == ["rank1.capture"]
    assert [each["capture"] is not None for each in found] == [False, True]
