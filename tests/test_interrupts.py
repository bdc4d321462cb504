"""Ctrl-C at any line of the library leaves models, modes and the next answer as they were."""

import gc
import os
import signal

import pytest
import torch

import elementgrad as eg
from elementgrad import cleanup
from elementgrad.cleanup import defer, guarded, scope
from tests import interrupted_jax, interrupted_keras, interrupted_torch
from tests.interrupts import interrupted, points, some, spelled

LONG = os.environ.get("HYPOTHESIS_PROFILE") == "long"
EVERY = {"torch": 3, "keras": 29, "jax": 29} if LONG else {"torch": 41, "keras": 151, "jax": 151}
"""Of the points at which a verb can be interrupted, one in so many is tried."""
FRAMEWORKS = [interrupted_torch, interrupted_keras, interrupted_jax]


def name(value):
    return value if isinstance(value, str) else value.NAME


pytestmark = pytest.mark.filterwarnings("ignore::elementgrad.ElementgradWarning")
reads = pytest.mark.parametrize(("fw", "verb"), [(fw, verb) for fw in FRAMEWORKS for verb in fw.READS], ids=name)
trains = pytest.mark.parametrize("fw", FRAMEWORKS[:2], ids=name)


@reads
def test_an_interrupted_read_leaves_nothing_behind(fw, verb):
    call, model = fw.READS[verb], fw.model()
    expected = call(model)
    every = points(lambda: call(model))
    before, around = fw.described(model), fw.surroundings()
    raised = 0
    for stop in some(every, EVERY[fw.NAME]):
        raised += interrupted(lambda: call(model), stop)
        assert fw.surroundings() == around, spelled(stop)
        assert fw.described(model) == before, spelled(stop)
        assert fw.same(call(model), expected), spelled(stop)
    assert raised > 0.8 * len(every) // EVERY[fw.NAME]


@trains
def test_an_interrupted_trainable_leaves_a_plain_model(fw):
    model = fw.model()
    eg.trainable(model, fw.PLACES).release()
    spare = []
    every = points(lambda: spare.append(eg.trainable(fw.model(), fw.PLACES)))
    spare.pop().release()
    before, around = fw.described(model), fw.surroundings()
    for stop in some(every, EVERY[fw.NAME]):
        made = []
        if not interrupted(lambda made=made: made.append(eg.trainable(model, fw.PLACES)), stop):
            made.pop().release()  # it did not come by there
        assert fw.described(model) == before, spelled(stop)
        assert fw.surroundings() == around, spelled(stop)
        eg.trainable(model, fw.PLACES).release()
        assert fw.described(model) == before, spelled(stop)


@trains
def test_an_interrupted_release_is_done_to_its_end(fw):
    model = fw.model()
    eg.trainable(model, fw.PLACES).release()
    other = eg.trainable(fw.model(), fw.PLACES)
    every = points(lambda: other.release(keep=False))
    before, around = fw.described(model), fw.surroundings()
    for stop in some(every, EVERY[fw.NAME]):
        elements = eg.trainable(model, fw.PLACES)
        fw.change(elements)
        interrupted(lambda elements=elements: elements.release(keep=False), stop)
        if elements.training:  # the interrupt came before it began
            elements.release(keep=False)
        assert fw.described(model) == before, spelled(stop)
        assert fw.surroundings() == around, spelled(stop)


@trains
def test_an_interrupted_second_trainable_leaves_the_first_as_it_was(fw):
    model = fw.model()
    first = eg.trainable(model, fw.PLACES[1:])
    eg.trainable(model, fw.PLACES[:1]).release()
    heard = len(fw.trains(first, model))
    before = fw.described(model)
    other = fw.model()
    eg.trainable(other, fw.PLACES[1:])
    eg.trainable(other, fw.PLACES[:1]).release()
    for stop in some(points(lambda: eg.trainable(other, fw.PLACES[:1])), EVERY[fw.NAME]):
        made = []
        if not interrupted(lambda made=made: made.append(eg.trainable(model, fw.PLACES[:1])), stop):
            made.pop().release()
        assert fw.described(model) == before, spelled(stop)
    assert len(fw.trains(first, model)) == heard


@trains
def test_interrupted_patches_are_applied_and_taken_back_whole_or_not_at_all(fw, tmp_path):
    path = tmp_path / "patch.safetensors"
    model = fw.model()
    before = fw.described(model)
    trained = eg.trainable(model, fw.PLACES)
    fw.change(trained)
    trained.save(path)
    trained.release(keep=False)
    assert fw.described(model) == before
    eg.apply(fw.model(), path)  # what runs once in a process has run then
    for stop in some(points(lambda: eg.apply(fw.model(), path)), EVERY[fw.NAME]):
        made = []
        if not interrupted(lambda made=made: made.append(eg.apply(model, path)), stop):
            made.pop().undo()  # it did not come by there
        assert fw.described(model) == before, spelled(stop)
    applied = eg.apply(fw.model(), path)
    for stop in some(points(applied.undo), EVERY[fw.NAME]):
        applied = eg.apply(model, path)
        interrupted(applied.undo, stop)
        applied.undo()
        assert fw.described(model) == before, spelled(stop)


def test_hooks_of_leaves_are_there_after_an_interrupted_backward():
    fw = interrupted_torch
    model = fw.model().eval()
    elements = eg.trainable(model, fw.PLACES)
    fired = []
    for leaf in elements.parameters():
        leaf.register_hook(lambda _: fired.append(1))
    for stop in some(points(lambda: fw.trains(elements, model)), EVERY["torch"]):
        interrupted(lambda: fw.trains(elements, model), stop)
        fired.clear()
        fw.trains(elements, model)
        assert len(fired) == len(elements), spelled(stop)


def test_undo_goes_on_after_an_interrupt_and_an_error():
    done = []

    def fails():
        raise ValueError("an undo that fails")

    def stops():
        done.append("stops")
        if done.count("stops") == 1:
            raise KeyboardInterrupt

    @guarded
    def verb():
        defer(done.append, "first")
        with scope():
            defer(stops)
            defer(fails)
            defer(done.append, "last")

    with pytest.raises(KeyboardInterrupt):
        verb()
    assert done == ["last", "stops", "stops", "first"]


def test_what_several_interrupts_left_is_undone_by_the_next_verb():
    done = []

    @guarded
    def verb():
        defer(done.append, "undone")
        raise SystemExit

    # Two interrupts in a row at the very end of a verb: its scope stays open.
    cleanup._Verb().__enter__()
    defer(done.append, "left over")
    with pytest.raises(SystemExit):
        verb()
    assert done == ["left over", "undone"]


@pytest.fixture
def signals():
    """A timer that interrupts as the keyboard does."""
    before = signal.getsignal(signal.SIGALRM)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def interrupt(call, seconds):
    """Call something again and again until it is interrupted.

    Signals go on coming for a while: Python reports one that comes in a destructor, and goes on.
    """

    def stop(*_):
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        for _ in range(10_000):
            call()
    except KeyboardInterrupt:
        return
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    raise AssertionError("no interrupt came through")


@pytest.mark.parametrize("verb", ["parameter", "check", "record"])
def test_real_signals_leave_a_model_as_it_was(signals, verb):
    fw, call = interrupted_torch, interrupted_torch.READS[verb]
    model = fw.model().eval()
    expected = call(model)
    gc.collect()  # models of other tests, whose elements train to their end
    before, around = fw.described(model), fw.surroundings()
    for number in range(100 if LONG else 25):
        interrupt(lambda: call(model), 0.0003 + 0.00037 * number)
        assert fw.described(model) == before
        assert fw.surroundings() == around
    assert fw.same(call(model), expected)


def test_real_signals_leave_a_model_that_trains_or_is_plain(signals):
    fw = interrupted_torch
    model = fw.model()
    eg.trainable(model, fw.PLACES).release()
    before = fw.described(model)
    for number in range(200 if LONG else 50):
        made = [None]

        def trained(made=made):
            made[0] = eg.trainable(model, fw.PLACES)
            made[0].release()

        interrupt(trained, 0.0003 + 0.00011 * number)
        if made[0] is not None and made[0].training:
            made[0].release()
        assert fw.described(model) == before


def test_a_lock_is_free_after_any_interrupt(signals):
    lock = cleanup.Lock()

    @guarded
    def verb():
        for _ in range(100):
            with lock.taken():
                pass

    for number in range(300):
        interrupt(verb, 0.00005 + 0.000003 * number)
        assert not lock._holder


def test_modes_are_left_wherever_they_are():
    x = torch.tensor([1.0, 2.0, 3.0])
    first = eg.record(x)
    first.__enter__()  # as an interrupt on the way into its end leaves it
    with eg.record(x) as rec:
        y = x * 2
        del first
        gc.collect()
        y.mul_(3)
        a = y * 1
        y[0] = 5.0
        z = (y * y * a).sum()
    assert rec.grad(z, y).tolist() == [60.0, 432.0, 972.0]
    assert torch._C._len_torch_function_stack() == torch._C._len_torch_dispatch_stack() == 0
