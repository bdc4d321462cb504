"""Elements under `MirroredStrategy`, in a process with two virtual devices, which TensorFlow must start with.

`python -m tests.support.sharded_keras_mirrored folder` prints, as JSON, what came of every check.
"""

import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import elementgrad as eg
from tests.support.keras_training import MOVED, PLACES, TARGETS, TOKENS, assert_only_places_moved, state, tagger
from tests.support.sharded_keras import (
    BATCH,
    EXACT,
    OPTIMIZERS,
    SMALL,
    SMALL_MOVED,
    assert_close,
    assert_replicas_agree,
    copies_of,
    exact_loop,
    exact_patch,
    loop,
    parts_of,
    run,
    small,
    spread,
    whole_numbers,
    wire,
)

SUMS = not hasattr(keras.src.losses.loss, "scale_loss_for_distribution")
"""Whether this Keras adds up what replicas find of their shares of a batch, where later ones take the mean."""


def fitted(model, optimizer, **options):
    share = 1 / model.distribute_strategy.num_replicas_in_sync if SUMS else 1.0
    with model.distribute_strategy.scope():
        model.compile(optimizer(), "mse", loss_weights=share, **options)
    history = model.fit(TOKENS, TARGETS, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
    return history.history["loss"]


def fit_is_that_of_one_process(strategy, folder):
    def many():
        return tagger(walk=False)

    some = [place for place in PLACES if "walk" not in place]
    for make, places, moved, name in ((many, some, MOVED, "adamw"), (small, SMALL, SMALL_MOVED, "momentum")):
        optimizer = OPTIMIZERS[name]
        alone, model = make(), spread(strategy, make)
        before = state(model)
        eg.trainable(alone, places)
        elements = eg.trainable(model, places)
        losses = fitted(alone, optimizer)
        mirrored = fitted(model, optimizer)
        if not SUMS:  # such a Keras also reports other losses than it takes
            np.testing.assert_allclose(mirrored, losses, rtol=1e-5)
        assert_close(model, alone)
        assert_replicas_agree(model, elements)
        assert_only_places_moved(model, before, moved)
        elements.release()
        assert_replicas_agree(model)
        assert len(model.trainable_variables) == len(model.weights)


def fit_in_eager_mode_and_inside_of_the_scope(strategy, folder):
    alone, model = small(), spread(strategy)
    eg.trainable(alone, SMALL)
    with strategy.scope():
        elements = eg.trainable(model, SMALL)
    fitted(alone, OPTIMIZERS["adam"])
    fitted(model, OPTIMIZERS["adam"], run_eagerly=True)
    assert_close(model, alone)
    assert_replicas_agree(model, elements)


def loops_of_ones_own_with_routed_losses(strategy, folder):
    alone, model = small(), spread(strategy)
    before = state(model)
    mine, elements = eg.trainable(alone, SMALL), eg.trainable(model, SMALL)
    with strategy.scope():
        optimizer = OPTIMIZERS["adamw"]()
    loop(alone, mine, None, OPTIMIZERS["adamw"](), routed=True)
    loop(model, elements, strategy, optimizer, routed=True)
    assert_close(model, alone)
    assert_replicas_agree(model, elements)
    assert_only_places_moved(model, before, SMALL_MOVED)


def other_variables_train_beside(strategy, folder):
    alone, model = small(), spread(strategy)
    for each in (alone, model):
        eg.trainable(each, "table/embeddings[0]")
        each.get_layer("head").trainable = True
        fitted(each, OPTIMIZERS["adam"])
    assert_close(model, alone)
    assert_replicas_agree(model)


def half_precision(strategy, folder):
    def make():
        return tagger("float16", walk=False)

    alone, model = make(), spread(strategy, make)
    before = state(model)
    places = ["table/embeddings[0, 5]", "table/embeddings[2]", "norm/gamma[::2]"]
    for each in (alone, model):
        elements = eg.trainable(each, places)
        fitted(each, OPTIMIZERS["momentum"])
    assert [variable.dtype for variable in elements.variables] == ["float32"] * 3
    assert_replicas_agree(model, elements)
    assert_only_places_moved(model, before, {"embeddings": 7, "gamma": 3})
    for one, two in zip(model.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(one, two, rtol=2e-3, atol=2e-4)


def the_patch_is_that_of_one_process(strategy, folder):
    one, two = Path(folder, "one.safetensors"), Path(folder, "two.safetensors")
    alone, _ = exact_patch(one)
    model, elements = exact_patch(two, strategy)
    assert one.read_bytes() == two.read_bytes()
    assert eg.inspect(one).entries[1].values.bits.any()
    assert all(np.array_equal(a, b) for a, b in zip(alone.get_weights(), model.get_weights(), strict=True))
    elements.undo()
    assert all(np.array_equal(a, b) for a, b in zip(whole_numbers().get_weights(), model.get_weights(), strict=True))
    assert_replicas_agree(model, elements)


def patches_come_go_and_resume_on_other_numbers_of_replicas(strategy, folder):
    path, again = Path(folder, "here.safetensors"), Path(folder, "again.safetensors")
    single = tf.distribute.MirroredStrategy(["CPU:1"])
    contents = []
    for first, second in ((None, strategy), (strategy, None), (strategy, single), (single, strategy)):
        trained, _ = exact_patch(path, first)
        model = whole_numbers() if second is None else spread(second, whole_numbers)
        start = model.get_weights()
        count = 1 if second is None else second.num_replicas_in_sync
        applied = eg.apply(model, path)
        assert all(np.array_equal(a, b) for a, b in zip(trained.get_weights(), model.get_weights(), strict=True))
        assert_replicas_agree(model, replicas=count)
        applied.undo()
        assert all(np.array_equal(a, b) for a, b in zip(start, model.get_weights(), strict=True))
        assert_replicas_agree(model, replicas=count)
        elements = eg.trainable(model, path)
        exact_loop(model, elements, second)
        assert_replicas_agree(model, elements, count)
        elements.save(again)
        contents.append(again.read_bytes())
        elements.release(keep=False)
        assert all(np.array_equal(a, b) for a, b in zip(start, model.get_weights(), strict=True))
        assert_replicas_agree(model, replicas=count)
    assert len(set(contents)) == 1


def whatever_is_written_reaches_every_replica(strategy, folder):
    model = spread(strategy, whole_numbers)
    elements = eg.trainable(model, EXACT)
    table = model.get_layer("table").embeddings
    elements[EXACT[1]].assign([7.0, 8.0, 9.0])
    assert [copy[2].tolist() for copy in copies_of(table)] == [[7.0, 8.0, 9.0]] * 2
    assert_replicas_agree(model, elements)
    table.assign(table + 1.0)
    assert [copy.tolist() for copy in copies_of(elements[EXACT[1]])] == [[8.0, 9.0, 10.0]] * 2
    assert_replicas_agree(model, elements)
    path = str(Path(folder, "model.weights.h5"))
    model.save_weights(path)
    kept = model.get_weights()
    model.set_weights([weights + 1 for weights in kept])
    assert_replicas_agree(model, elements)
    model.load_weights(path)
    assert_replicas_agree(model, elements)
    assert all(np.array_equal(a, b) for a, b in zip(kept, model.get_weights(), strict=True))
    checkpoint = tf.train.Checkpoint(model=model)
    saved = checkpoint.save(str(Path(folder, "checkpoint")))
    model.set_weights([weights + 1 for weights in kept])
    checkpoint.restore(saved)
    assert all(np.array_equal(a, b) for a, b in zip(kept, model.get_weights(), strict=True))
    assert_replicas_agree(model, elements)
    plain = whole_numbers()
    plain.load_weights(path)
    assert all(np.array_equal(a, b) for a, b in zip(kept, plain.get_weights(), strict=True))


def only_the_elements_are_on_the_wire(strategy, folder):
    for width in (20, 2000):
        whole, elements = wire(strategy, width)
        # Each replica gives to the sum what it trains; the first one tells the others how many steps there were.
        assert (whole, elements) == ((4 * 25 * width, 8), (4 * 4, 8))


def what_cannot_work_is_refused(strategy, folder):
    plain = whole_numbers()
    with strategy.scope(), pytest.raises(eg.FrameworkError, match="made outside of the scope of this MirroredStrategy"):
        eg.trainable(plain, EXACT)
    model = spread(strategy, whole_numbers)
    with pytest.raises(eg.FrameworkError, match=r"call this outside of strategy\.run"):
        strategy.run(lambda: eg.trainable(model, EXACT))
    with tf.distribute.MirroredStrategy(["CPU:0"]).scope(), pytest.raises(eg.FrameworkError, match="made outside"):
        eg.trainable(model, EXACT)
    central = spread(tf.distribute.experimental.CentralStorageStrategy(["CPU:0", "CPU:1"]), whole_numbers)
    with pytest.raises(eg.FrameworkError, match="CentralStorageStrategy; elements train under MirroredStrategy"):
        eg.trainable(central, EXACT)
    elements = eg.trainable(plain, EXACT)

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(plain(x))
        return elements.gradients(tape, loss)

    with pytest.raises(eg.FrameworkError, match="made outside of the scope of this MirroredStrategy"):
        strategy.run(step, args=(parts_of(strategy, TOKENS[:, :2]),))
    one = tf.distribute.OneDeviceStrategy("CPU:1")
    alone = spread(one, whole_numbers)
    with one.scope():
        exact_loop(alone, eg.trainable(alone, EXACT), one)


CHECKS = [
    fit_is_that_of_one_process,
    fit_in_eager_mode_and_inside_of_the_scope,
    loops_of_ones_own_with_routed_losses,
    other_variables_train_beside,
    half_precision,
    the_patch_is_that_of_one_process,
    patches_come_go_and_resume_on_other_numbers_of_replicas,
    whatever_is_written_reaches_every_replica,
    only_the_elements_are_on_the_wire,
    what_cannot_work_is_refused,
]

if __name__ == "__main__":
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    run(CHECKS, tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]), sys.argv[1])
