"""Long work shows its progress on a terminal, and nowhere else."""

import os
import pty
import subprocess
import sys
import textwrap

PROGRESS = """
    import time, torch, elementgrad as eg
    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2
        @staticmethod
        def backward(ctx, g):
            time.sleep(0.4 if float(g.sum()) else 0)
            return g * 2
    eg.jacobian(Slow.apply, torch.ones(8)).dense()
"""


def test_long_work_shows_its_progress_on_a_terminal():
    leader, follower = pty.openpty()
    code = textwrap.dedent(PROGRESS)
    with subprocess.Popen([sys.executable, "-c", code], stderr=follower, stdout=subprocess.PIPE) as process:
        os.close(follower)
        shown = b""
        try:
            while chunk := os.read(leader, 1024):
                shown += chunk
        except OSError:  # how the end of a terminal is told on Linux
            pass
    assert process.returncode == 0
    assert b"8 reverse sweeps" in shown


def test_long_work_is_silent_elsewhere():
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(PROGRESS)], capture_output=True, check=True)
    assert done.stdout == done.stderr == b""
