"""Elements under `MultiWorkerMirroredStrategy`: one of the processes that `TF_CONFIG` tells of.

`python -m tests.support.sharded_keras_workers folder` prints, as JSON, what came of every check.
"""

import os
import socket
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

import elementgrad as eg
from tests.support.keras_training import assert_only_places_moved, state
from tests.support.sharded_keras import (
    EXACT,
    OPTIMIZERS,
    SMALL,
    SMALL_MOVED,
    assert_close,
    assert_replicas_agree,
    exact_loop,
    exact_patch,
    loop,
    run,
    small,
    spread,
    whole_numbers,
    wire,
    wired,
)


def assert_workers_agree(strategy, model):
    """All of the model is the same in every process, to the bit."""
    mine = np.concatenate([weights.astype(np.float32).reshape(-1).view(np.int32) for weights in model.get_weights()])
    each = strategy.experimental_distribute_values_from_function(lambda _: tf.constant(mine[None]))
    every = strategy.gather(each, axis=0).numpy()
    assert len(every) == strategy.num_replicas_in_sync == 2
    assert (every == every[0]).all()


def all_here(strategy):
    """Wait for the others."""
    strategy.gather(strategy.experimental_distribute_values_from_function(lambda _: tf.zeros([1])), axis=0)


def loops_are_those_of_one_process(strategy, folder):
    for name, routed in (("momentum", False), ("adamw", True)):
        alone, model = small(), spread(strategy)
        before = state(model)
        mine, elements = eg.trainable(alone, SMALL), eg.trainable(model, SMALL)
        loop(alone, mine, None, OPTIMIZERS[name](), routed)
        with strategy.scope():
            optimizer = OPTIMIZERS[name]()
        loop(model, elements, strategy, optimizer, routed)
        assert_close(model, alone)
        assert_workers_agree(strategy, model)
        assert_replicas_agree(model, elements, replicas=1)
        assert_only_places_moved(model, before, SMALL_MOVED)
        elements.release()
        assert_workers_agree(strategy, model)


def one_process_writes_the_patch_of_all(strategy, folder):
    chief = strategy.cluster_resolver.task_id == 0
    mine = Path(folder, f"of_{strategy.cluster_resolver.task_id}.safetensors")
    alone = Path(folder, f"alone_{strategy.cluster_resolver.task_id}.safetensors")
    exact_patch(alone)
    model, elements = exact_patch(mine, strategy)
    assert mine.exists() == chief
    if chief:
        assert mine.read_bytes() == alone.read_bytes()
    with pytest.raises(OSError if chief else eg.PatchError):
        elements.save(Path(folder, "nowhere", "patch.safetensors"))
    trained = model.get_weights()
    elements.undo()
    start = model.get_weights()
    assert all(np.array_equal(a, b) for a, b in zip(start, whole_numbers().get_weights(), strict=True))
    elements.release()
    all_here(strategy)
    other = spread(strategy, whole_numbers)
    applied = eg.apply(other, Path(folder, "of_0.safetensors"))
    assert all(np.array_equal(a, b) for a, b in zip(trained, other.get_weights(), strict=True))
    applied.undo()
    assert all(np.array_equal(a, b) for a, b in zip(start, other.get_weights(), strict=True))
    shared, single = eg.trainable(other, alone), whole_numbers()
    resumed = eg.trainable(single, alone)
    exact_loop(other, shared, strategy)
    exact_loop(single, resumed, None)
    assert all(np.array_equal(a, b) for a, b in zip(single.get_weights(), other.get_weights(), strict=True))
    assert_workers_agree(strategy, other)


def only_the_elements_are_on_the_wire(strategy, folder):
    for width in (20, 2000):
        assert wire(strategy, width) == ((4 * 25 * width, 0), (4 * 4, 0))


def acknowledged():
    """Bytes that left this process by TCP and have arrived, as the kernel counts them (tcpi_bytes_acked)."""
    total = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        if not descriptor.is_socket():
            continue
        with socket.socket(fileno=os.dup(int(descriptor.name))) as each:
            if each.family in (socket.AF_INET, socket.AF_INET6) and each.type == socket.SOCK_STREAM:
                total += struct.unpack_from("<Q", each.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 128), 120)[0]
    return total


def sockets_carry_little_more(strategy, folder):
    steps, carried = 20, []
    for elements, step, batch in wired(strategy, 2000):
        step(*batch)
        all_here(strategy)
        before = acknowledged()
        for _ in range(steps):
            step(*batch)
        all_here(strategy)
        numbers = sum(int(np.prod(variable.shape)) for variable in elements.variables)
        carried.append((acknowledged() - before) / steps - 4 * numbers)
    # What is said around the numbers is the same for a whole layer and for four elements of it: a message or two.
    assert all(0 < envelope < 4096 for envelope in carried), carried


def processes_that_disagree_are_told(strategy, folder):
    model = spread(strategy, whole_numbers)
    with pytest.raises(eg.FrameworkError, match="name the same ones in each"):
        eg.trainable(model, f"table/embeddings[{strategy.cluster_resolver.task_id}]")
    places = EXACT[: 1 + strategy.cluster_resolver.task_id]
    with pytest.raises(eg.FrameworkError, match="name the same ones in each"):
        eg.trainable(model, places)
    eg.trainable(model, EXACT).release()


CHECKS = [
    loops_are_those_of_one_process,
    one_process_writes_the_patch_of_all,
    only_the_elements_are_on_the_wire,
    sockets_carry_little_more,
    processes_that_disagree_are_told,
]

if __name__ == "__main__":
    run(CHECKS, tf.distribute.MultiWorkerMirroredStrategy(), sys.argv[1])
