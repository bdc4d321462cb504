"""Ctrl-C at any line of the library leaves models, modes and the next answer as they were."""

import contextlib
import gc
import inspect
import os
import signal
import sys
import threading
import weakref
from types import BuiltinMethodType

import jax
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import elementgrad as eg
from elementgrad import _cleanup as cleanup
from elementgrad._backends import reachable_state
from elementgrad._backends.torch.isolate import _flags, _set_flags, ambient_state, enter_mode, snapshot_ambient_state
from elementgrad._cleanup import call_atomically, defer, scope, with_cleanup
from tests.support import user_jax, user_keras, user_torch
from tests.support.interrupts import interrupted, points, some, spelled

LONG = os.environ.get("HYPOTHESIS_PROFILE") == "long"
EVERY = {"torch": 1, "keras": 1, "jax": 1} if LONG else {"torch": 73, "keras": 199, "jax": 199}
"""Of the points at which a verb can be interrupted, one in so many is tried."""
FRAMEWORKS = [user_torch, user_keras, user_jax]


def name(value):
    return value if isinstance(value, str) else value.NAME


pytestmark = pytest.mark.filterwarnings("ignore::elementgrad.ElementgradWarning")
reads = pytest.mark.parametrize(("fw", "verb"), [(fw, verb) for fw in FRAMEWORKS for verb in fw.READS], ids=name)
trains = pytest.mark.parametrize("fw", FRAMEWORKS[:2], ids=name)


@reads
def test_an_interrupted_read_restores_all_state(fw, verb):
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


def test_an_interrupt_inside_settings_of_jax_leaves_none_to_the_thread():
    call, model, source = user_jax.READS["explain"], user_jax.model(), jax._src.config.__file__
    call(model)
    around = user_jax.surroundings()
    config = jax._src.config  # its contexts are generators in older versions
    inside = inspect.getsourcelines(getattr(config, "StateContextManager", config.State.__call__))
    lines = range(inside[1], inside[1] + len(inside[0]))
    stops = [stop for stop in points(lambda: call(model), source) if stop[0][1] in lines]
    assert len(stops) > 5
    for stop in stops:
        interrupted(lambda: call(model), stop, source)
        assert user_jax.surroundings() == around, spelled(stop)


def test_an_interrupted_recording_leaves_no_tensors_without_numbers_in_caches():
    cache, weight, x = {"scale": 2.0}, torch.ones(1, 1, 3, 3), torch.ones(1, 1, 8, 8)

    def f(x):
        x = torch.conv2d(x, weight, padding=1)
        return x * cache.setdefault("mask", x * 0 + cache["scale"])

    source = reachable_state.__file__
    every = points(lambda: eg.grad(f, x, of="output[0, 0, 4, 4]", cone=True), source)
    assert len(every) > 50
    for stop in every:
        cache.pop("mask", None)
        interrupted(lambda: eg.grad(f, x, of="output[0, 0, 4, 4]", cone=True), stop, source)
        assert cache["scale"] == 2.0, spelled(stop)
        assert type(cache.get("mask", x)) is torch.Tensor, spelled(stop)


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


def test_the_next_forward_has_the_values_that_an_interrupted_one_did_not_take():
    fw = user_torch
    model = fw.model().eval()
    leaves = list(eg.trainable(model, fw.PLACES).parameters())
    weight, bias = model[0]._parameters["weight"], model[5]._parameters["bias"]

    def step():
        with torch.no_grad():
            torch._foreach_add_(leaves, 1.0)
        model(fw.X)

    for stop in some(points(step), 1 if LONG else 2):
        interrupted(step, stop)
        model(fw.X)
        assert torch.equal(torch.cat([weight[0, 1:2], weight[2], bias]), torch.cat(leaves)), spelled(stop)


def test_hooks_of_leaves_are_there_after_an_interrupted_backward():
    fw = user_torch
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

    @with_cleanup
    def verb():
        defer(done.append, "first")
        with scope():
            defer(stops)
            defer(fails)
            defer(done.append, "last")

    with pytest.raises(KeyboardInterrupt):
        verb()
    assert done == ["last", "stops", "stops", "first"]


def test_the_next_verb_undoes_the_remains_of_several_interrupts():
    done = []

    @with_cleanup
    def verb():
        defer(done.append, "undone")
        raise SystemExit

    # Two interrupts in a row at the very end of a verb: its scope stays open.
    cleanup._Verb().__enter__()
    defer(done.append, "left over")
    with pytest.raises(SystemExit):
        verb()
    assert done == ["left over", "undone"]


@pytest.fixture(autouse=True)
def nothing_left():
    """Look whether a test leaves modes on, and only then turn them off, so that no other test runs under them."""
    restore = snapshot_ambient_state()
    before = ambient_state(), _flags()
    yield
    after = ambient_state(), _flags()
    restore()
    call_atomically(*_set_flags(before[1]))
    assert after == before


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

    armed = True

    def stop(*_):
        if armed:
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            raise KeyboardInterrupt

    try:
        try:  # the first may come before the call does, and the next while this one is handled
            signal.signal(signal.SIGALRM, stop)
            signal.setitimer(signal.ITIMER_REAL, seconds)
            for _ in range(10_000):
                call()
        except KeyboardInterrupt:
            armed = False
            return
    except KeyboardInterrupt:
        return
    finally:
        armed = False
        signal.setitimer(signal.ITIMER_REAL, 0)
    raise AssertionError("no interrupt came through")


@pytest.mark.parametrize("verb", ["parameter", "check", "sparse", "record"])
def test_real_signals_leave_a_model_as_it_was(signals, verb):
    fw, call = user_torch, user_torch.READS[verb]
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
    fw = user_torch
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

    @with_cleanup
    def verb():
        for _ in range(100):
            with lock.hold():
                pass

    for number in range(300):
        interrupt(verb, 0.00005 + 0.000003 * number)
        assert not lock._holder


def test_a_recording_left_open_ends_below_another_recording():
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


def test_a_mode_is_left_after_an_interrupt_anywhere_in_pytorch(monkeypatch):
    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    pushes = torch.utils._python_dispatch._push_mode

    def before(mode):
        raise KeyboardInterrupt

    def after(mode):
        pushes(mode)
        raise KeyboardInterrupt

    @with_cleanup
    def verb():
        enter_mode(Mode())

    for interrupting in (before, after):
        monkeypatch.setattr(torch.utils._python_dispatch, "_push_mode", interrupting)
        with pytest.raises(KeyboardInterrupt):
            verb()
        assert torch._C._len_torch_dispatch_stack() == 0
        assert not torch.utils._python_dispatch.is_in_torch_dispatch_mode()
        with pytest.raises(KeyboardInterrupt):
            eg.jacobian(lambda x: x**2, torch.ones(2)).sparse()
        assert not torch.utils._python_dispatch.is_in_torch_dispatch_mode()


def test_modes_of_the_user_are_put_back_after_an_interrupt():
    class Mode(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    def stopped(x):
        torch._C._pop_torch_function_stack()  # as PyTorch does for a moment
        raise KeyboardInterrupt

    with Mode() as mode:
        with pytest.raises(KeyboardInterrupt):
            eg.grad(stopped, torch.ones(2))
        assert torch._C._get_function_stack_at(0) is mode


@pytest.mark.parametrize("verb", ["contributions", "explain", "grad"])
def test_an_interrupt_while_pytorch_has_a_mode_off_is_no_error(verb):
    def stopped(x):
        if torch._C._len_torch_function_stack():
            torch._C._pop_torch_function_stack()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        getattr(eg, verb)(stopped, torch.ones(2), of="output[0]")


@pytest.mark.parametrize("kind", ["verb", "recording"])
def test_an_interrupt_before_pytorch_puts_a_mode_back_leaves_none(kind):
    code = contextlib._GeneratorContextManager.__exit__.__code__

    def stop(frame, event, argument):
        if frame.f_code is code and "_pop_mode_temporarily" in frame.f_locals["self"].gen.__name__:
            sys.settrace(None)
            raise KeyboardInterrupt

    def stopped(x):
        sys.settrace(stop)
        return torch.nn.functional.dropout(x, training=False)

    def call():
        x = torch.ones(2)
        if kind == "verb":
            eg.contributions(stopped, x, of="output[0]")
        with eg.record(x):
            stopped(x)

    before, trace = ambient_state(), sys.gettrace()
    try:
        with pytest.raises(KeyboardInterrupt):
            call()
    finally:
        sys.settrace(trace)
    gc.collect()
    assert ambient_state() == before


def test_a_mode_that_pytorch_puts_back_too_late_is_off_from_the_next_verb():
    x = torch.ones(2)
    with eg.record(x):
        mode = torch._C._get_function_stack_at(0)
    torch._C._push_on_torch_function_stack(mode)
    assert eg.grad(lambda x: x.sum(), x).tolist() == [1.0, 1.0]
    assert torch._C._len_torch_function_stack() == 0


def test_flags_of_modes_are_right_when_modes_end_out_of_order():
    x = torch.ones(2)
    first, second = eg.record(x), eg.record(x)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert torch.utils._python_dispatch.is_in_torch_dispatch_mode()
    second.__exit__(None, None, None)
    assert not torch.utils._python_dispatch.is_in_torch_dispatch_mode()


@pytest.mark.parametrize("end", ["dies", "dies elsewhere", "interrupted"])
def test_a_recording_without_an_exit_ends_when_freed_or_at_the_next_verb(monkeypatch, end):
    x = torch.ones(2)
    recordings = [eg.record(x)]
    recordings[0].__enter__()
    assert len(ambient_state().dispatch_modes) == 1
    if end == "dies elsewhere":
        thread = threading.Thread(target=recordings.clear)
        thread.start()
        thread.join()
    else:
        if end == "interrupted":  # Python reports an interrupt in `__del__` and goes on
            monkeypatch.delattr(type(recordings[0]), "__del__")
        recordings.clear()
    assert len(ambient_state().dispatch_modes) == (end != "dies")
    eg.grad(lambda x: x.sum(), x)
    assert ambient_state().dispatch_modes == ambient_state().function_modes == ()


def test_the_exit_of_a_recording_cannot_be_interrupted_at_its_start():
    x = torch.ones(2)
    recording = eg.record(x)
    assert isinstance(recording.__exit__, BuiltinMethodType)
    with recording:
        getattr(recording, "__exit__")  # noqa: B009  # looking does not end it
        gc.collect()
        assert len(ambient_state().dispatch_modes) == 1
    with contextlib.ExitStack() as stack:
        stack.enter_context(eg.record(x))
        assert len(ambient_state().dispatch_modes) == 1
    with eg.record(x):  # without a name
        gc.collect()
        assert len(ambient_state().dispatch_modes) == 1
    assert ambient_state().dispatch_modes == ()
    died = weakref.ref(recording)
    gc.disable()
    del recording
    gc.enable()
    assert died() is None  # it is in no cycle


def test_an_interrupted_block_ends_what_was_entered_in_it():
    x, before = torch.ones(2), ambient_state()

    def stopped(error):
        with eg.record(x):
            torch.set_grad_enabled(False)
            torch._C._autograd._push_saved_tensors_default_hooks(lambda x: x, lambda x: x)
            raise error

    with pytest.raises(KeyboardInterrupt):
        stopped(KeyboardInterrupt)
    assert ambient_state() == before
    with pytest.raises(ValueError, match="no interrupt"):
        stopped(ValueError("no interrupt"))
    assert not torch.is_grad_enabled()  # the user's own code did that
    torch.set_grad_enabled(True)
    torch._C._autograd._pop_saved_tensors_default_hooks()


def test_autocast_nesting_is_repaired_when_a_block_ends_twice():
    @with_cleanup
    def verb():
        block = torch.autocast("cpu")
        block.__enter__()
        block.__exit__(None, None, None)
        block.__exit__(None, None, None)  # as after an interrupt in the first

    before = ambient_state()
    verb()
    assert ambient_state() == before


def test_attention_has_its_kernels_after_an_interrupt(monkeypatch):
    before = user_torch.surroundings()["kernels"]
    set_flash, calls = torch._C._set_sdp_use_flash, []

    def flash(on):
        set_flash(on)
        calls.append(on)
        if calls == [False, True]:  # they are being put back
            raise KeyboardInterrupt

    monkeypatch.setattr(torch._C, "_set_sdp_use_flash", flash)
    with pytest.raises(KeyboardInterrupt):
        user_torch.READS["sparse"](user_torch.model().eval())
    assert user_torch.surroundings()["kernels"] == before
