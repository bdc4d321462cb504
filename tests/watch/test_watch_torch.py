"""Watching loops of PyTorch: what is a hit and what is none, and what is left behind."""

# ruff: noqa: PT012 (the block is what is watched)

import contextlib
import os
import stat
import threading
from pathlib import Path

import pytest
import torch

import elementgrad as eg
from tests.support.faulty_runs import Case, draw, judge, run


@pytest.fixture
def capture(tmp_path):
    return str(tmp_path / "nan.capture")


def net():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 2)
    )


def train(model, optimizer, steps=4, faulty=None):
    for step in range(steps):
        x = torch.randn(5, 3)
        if step == faulty:
            x[1, 2] = float("nan")
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()


def left_behind(model, optimizer):
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    scaler, norm = torch.amp.GradScaler.scale, torch.nn.utils.clip_grad._get_total_norm
    steps = len(optimizer._optimizer_step_pre_hooks), len(optimizer._optimizer_step_post_hooks)
    return set(vars(model)), hooks, scaler, norm, steps


@pytest.mark.parametrize("options", [{"micro_batches": 3}, {"clip": True}, {"amp": True}, {"amp": True, "clip": True}])
@pytest.mark.parametrize("fault", ["inf in a parameter", "0/0", "bad batch", "optimizer"])
def test_a_fault_is_found_with_accumulation_clipping_and_a_scaler(fault, options, capture):
    case = draw(fault, 1, 3)
    outcome = run("torch", case, capture, **options)
    assert judge(case, outcome) == [], str(outcome.error)
    assert outcome.error.micro_batch == 0


def test_a_compiled_model_is_watched_from_outside(capture):
    case = draw("0/0", 2, 3)
    outcome = run("torch", case, capture, wrap=lambda model: torch.compile(model, backend="eager"))
    assert judge(case, outcome) == [], str(outcome.error)


def bad_parameter(call, model, optimizer):
    with pytest.raises(eg.WatchError) as caught, eg.watch(model, optimizer, capture=None):
        for step in range(3):
            if step == 2:
                with torch.no_grad():
                    model[2].weight[1, 2] = torch.inf
            optimizer.zero_grad()
            call(torch.randn(5, 4)).square().mean().backward()
            optimizer.step()
    return caught.value


@pytest.mark.parametrize("early", [False, True])
def test_a_plain_model_is_watched_while_its_compiled_form_is_called(early):
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled = torch.compile(model, backend="eager")
    wrapper, call = type(compiled), type(compiled).__call__
    if early:
        compiled(torch.randn(5, 4))
    error = bad_parameter(compiled, model, optimizer)
    assert (error.place, error.cause, error.step) == ("2.weight[1, 2]", "bad-parameter", 2)
    assert "output[0, 1] is" in error.tripped
    assert wrapper.__call__ is call


def test_a_bad_parameter_is_named_where_no_call_of_the_model_is_seen():
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    error = bad_parameter(model.forward, model, optimizer)
    assert (error.place, error.cause, error.step) == ("2.weight[1, 2]", "bad-parameter", 2)


def test_a_run_without_a_call_of_the_model_says_so():
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(eg.WatchError, match="no call of the model was seen") as caught, eg.watch(model, optimizer):
        (model.forward(torch.ones(2, 4)) * torch.inf).sum().backward()
        optimizer.step()
    assert caught.value.cause == "unseen"


def test_the_micro_batch_at_fault_is_named():
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(eg.WatchError) as caught, eg.watch(model, optimizer, capture=None):
        for number in range(4):
            out = model(torch.ones(1, 2))
            (out.sum() if number != 2 else (out - out.detach()).sqrt().sum()).backward()
        optimizer.step()
    assert (caught.value.micro_batch, caught.value.cause) == (2, "outside")
    assert caught.value.clause == "it is outside the model, after output[0, 0]"


def root(output):
    return (output - output.detach()).sqrt().sum()


@pytest.mark.parametrize("loss", [root, torch.nn.MSELoss()])
def test_a_loss_that_is_given_is_followed(loss):
    model = torch.nn.Linear(2, 2)
    with pytest.raises(eg.WatchError) as caught, eg.watch(model, capture=None, loss=loss) as watch:
        out = model(torch.ones(1, 2))
        if loss is root:
            loss(out).backward()
        else:
            loss(out, torch.full((1, 2), float("inf"))).backward()
    found = caught.value.cause, caught.value.operation if loss is root else caught.value.place
    assert found == (("singular", "sqrt") if loss is root else ("bad-input", "loss.target[0, 0]")), str(caught.value)
    assert watch.error is caught.value


def test_gradients_that_a_scaler_skips_are_no_hit():
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    with eg.watch(model, optimizer, capture=None):
        for _ in range(3):
            optimizer.zero_grad()
            scaler.scale(model(torch.full((4, 2), 1e3)).square().sum()).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
    assert scaler.get_scale() < 2.0**127


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("unscales", [False, True])
def test_gradients_of_one_optimizer_that_a_scaler_skips_are_no_hit_of_another(unscales, backwards):
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in model]
    scaler = torch.amp.GradScaler("cpu")
    before = [p.detach().clone() for p in model.parameters()]
    with eg.watch(model, optimizers, capture=None):
        for step in range(4):
            model.zero_grad()
            scaler.scale(model(torch.ones(4, 2)).square().sum()).backward()
            if step < 2:  # the factor was too large for one of them
                model[step].weight.grad[0, 1] = torch.inf
            for optimizer in optimizers if unscales else ():
                scaler.unscale_(optimizer)
            for optimizer in optimizers[::-1] if backwards else optimizers:
                scaler.step(optimizer)
            scaler.update()
    assert not any(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    with pytest.raises(eg.WatchError) as caught, eg.watch(model, optimizers, capture=None):
        scaler.scale(model(torch.tensor([[1.0, torch.nan]])).sum()).backward()
    assert caught.value.place == "input[0, 1]"


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_a_scaler_skips_counts_once(fused):
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    scaler = torch.amp.GradScaler("cpu")
    with pytest.raises(eg.WatchError) as caught, eg.watch(model, optimizer, capture=None):
        for step in range(4):
            optimizer.zero_grad()
            scaler.scale(model(torch.full((1, 2), torch.nan if step == 3 else 1.0)).sum()).backward()
            if step == 1:
                model.weight.grad[0, 1] = torch.inf
            scaler.step(optimizer)
            scaler.update()
    assert (caught.value.step, caught.value.place) == (3, "input[0, 0]")


def test_the_norm_of_clip_grad_norm_is_not_computed_again(monkeypatch):
    model, norms = torch.nn.Linear(2, 1), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    total = torch.nn.utils.get_total_norm
    monkeypatch.setattr(torch.nn.utils, "get_total_norm", lambda tensors: norms.append(len(tensors)) or total(tensors))
    with eg.watch(model, optimizer, capture=None):
        norms.clear()  # of the parameters at the start
        model(torch.ones(1, 2)).sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    assert norms == [1, 2]  # of the output, and of the parameters after the step
    with pytest.raises(eg.WatchError, match="outside the model"), eg.watch(model, optimizer, capture=None):
        (model(torch.ones(1, 2)) * float("inf")).sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def test_rules_stop_at_gradients_of_parameters_and_activations():
    model = net()
    for place in ("3.weight[1]", "0"):
        with (
            pytest.raises(eg.WatchError) as caught,
            eg.watch(model, capture=None, when={place: lambda g: g.abs().max() > 0}),
        ):
            model(torch.randn(5, 3)).sum().backward()
        assert (caught.value.cause, caught.value.place.partition("[")[0]) == ("rule", place.partition("[")[0])
        assert caught.value.where.startswith("test_watch_torch.py:")


@pytest.mark.parametrize("result", ["tensor", "error"])
def test_a_rule_that_gives_no_truth_value_is_said_and_its_own_error_is_raised(result):
    model = net()
    rule = {"3.weight": lambda g: g > 0 if result == "tensor" else {}["the user's own"]}
    expected = (eg.OptionError, r"let it end in .any\(\)") if result == "tensor" else (KeyError, "the user's own")
    with pytest.raises(expected[0], match=expected[1]), eg.watch(model, capture=None, when=rule):
        model(torch.randn(5, 3)).sum().backward()


def test_a_watch_is_of_one_block():
    watch = eg.watch(net(), capture=None)
    with watch:
        pass
    with pytest.raises(eg.OptionError, match="a watch is of one block"), watch:
        pass


def test_a_healthy_run_has_the_same_bits_and_leaves_nothing():
    runs = []
    for watched in (False, True):
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        before = left_behind(model, optimizer)
        torch.manual_seed(1)
        with eg.watch(model, optimizer, capture="never.capture") if watched else contextlib.nullcontext():
            train(model, optimizer)
        assert left_behind(model, optimizer) == before
        runs.append([*model.state_dict().values(), torch.get_rng_state()])
    assert all(torch.equal(x, y) for x, y in zip(*runs, strict=True))
    assert not os.path.exists("never.capture")


@pytest.mark.parametrize("raised", [KeyError, KeyboardInterrupt, eg.WatchError])
def test_nothing_is_left_after_an_error(raised):
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    before = left_behind(model, optimizer)
    with pytest.raises(raised), eg.watch(model, optimizer, capture=None):
        out = model(torch.randn(5, 3))
        train(model, optimizer, faulty=2 if raised is eg.WatchError else None)
        raise raised("the user's own")
    assert left_behind(model, optimizer) == before
    assert not out._backward_hooks


def test_an_error_of_the_user_is_not_hidden_by_a_bad_gradient():
    model = net()
    with pytest.raises(KeyError), eg.watch(model, capture=None):
        (model(torch.randn(5, 3)) * float("inf")).sum().backward()
        raise KeyError


def test_a_gradient_at_the_end_of_the_block_is_looked_at():
    model = net()
    with pytest.raises(eg.WatchError, match="outside the model"), eg.watch(model, capture=None):
        (model(torch.randn(5, 3)) * float("inf")).sum().backward()


def test_a_row_that_is_masked_as_a_whole_is_named_and_other_masks_are_no_fault():
    class Attention(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = torch.nn.Linear(3, 3)
            self.register_buffer("mask", torch.full((3, 3), float("-inf")).triu(1))

        def forward(self, x, row=None):
            scores = self.inner(x) @ x.T + self.mask
            scores = scores if row is None else scores.masked_fill(row, float("-inf"))
            return torch.softmax(scores, -1) @ x

    model = Attention()
    with pytest.raises(eg.WatchError) as caught, eg.watch(model, capture=None):
        model(torch.randn(3, 3)).sum().backward()
        model(torch.randn(3, 3), torch.tensor([[False], [True], [False]]))
    assert (caught.value.cause, caught.value.operation) == ("masked-row", "softmax")
    with pytest.raises(eg.WatchError) as caught, eg.watch(model, capture=None):
        model(torch.tensor([[1.0, float("nan"), 0.0]] * 3))
    assert caught.value.place == "x[0, 1]"


def test_parameters_that_are_bad_at_the_start_are_named():
    model = net()
    model[3].bias.data[1] = float("nan")
    with pytest.raises(eg.WatchError, match=r"3.bias\[1\] is nan at the start"), eg.watch(model):
        pytest.fail("the block ran")


def test_a_capture_is_private_whole_and_holds_no_pickle(capture):
    class Odd(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = torch.nn.Linear(2, 2)

        def forward(self, x, how):
            return self.inner(x["x"])

    model, argument = Odd(), object()
    with pytest.raises(eg.WatchError) as caught, eg.watch(model, capture=capture) as watch:
        model({"x": torch.tensor([[1.0, float("inf")]])}, argument)
    assert stat.S_IMODE(os.stat(capture).st_mode) == 0o600
    assert os.listdir(os.path.dirname(capture)) == ["nan.capture"]
    assert caught.value.capture == capture
    assert watch.replay().same
    with pytest.raises(eg.OptionError, match=r"the capture lacks arguments.0.1, of type object"):
        eg.watch(model).replay(capture)


def test_what_is_no_capture_of_this_model_is_refused(capture):
    model = net()
    with pytest.raises(eg.WatchError), eg.watch(model, capture=capture):
        model(torch.full((5, 3), float("nan")))
    other = torch.nn.Sequential(torch.nn.Linear(3, 5))
    with pytest.raises(eg.OptionError, match=r"the capture is of another model: 0.weight was parameter"):
        eg.watch(other).replay(capture)
    assert eg.watch(net()).replay(capture).same
    whole = Path(capture).read_bytes()
    for content in (
        whole[:-1],
        whole[: len(whole) // 2],
        whole[:100],
        whole[:4],
        b"",
        b"PK" + whole,
        whole[:-9] + b"x" * 9,
    ):
        Path(capture).write_bytes(content)
        with pytest.raises(eg.OptionError, match=r"no capture|damaged or cut short"):
            eg.watch(model).replay(capture)
    with pytest.raises(eg.OptionError, match="nothing was captured"):
        eg.watch(model).replay()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no device that is always full")
def test_a_full_disk_is_said_and_hides_nothing():
    model = net()
    with pytest.raises(eg.WatchError) as caught, eg.watch(model, capture="/dev/full"):
        model(torch.full((5, 3), float("nan")))
    assert caught.value.cause == "bad-input"
    assert "/dev/full could not be written: No space left on device" in str(caught.value)


def test_several_forwards_before_one_backward_are_told_apart():
    model = torch.nn.Linear(2, 1)
    with pytest.raises(eg.WatchError) as caught, eg.watch(model, capture=None):
        first, second = model(torch.ones(1, 2)), model(torch.zeros(1, 2))
        (first.sum() + (second - second.detach()).sqrt().sum()).backward()
    assert (caught.value.micro_batch, caught.value.cause) == (1, "outside")


def test_a_case_without_a_fault_runs_to_its_end(capture):
    assert run("torch", Case("none", 3, 9, 0, (0, 0)), capture)[:2] == (None, None)


def test_the_gradient_that_a_closure_of_the_optimizer_makes_is_looked_at():
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def closure():
        optimizer.zero_grad()
        loss = (model(torch.zeros(1, 2)) * 0 + model.weight.sum() * 0).sqrt().sum()
        loss.backward()
        return loss

    with pytest.raises(eg.WatchError) as caught, eg.watch(model, optimizer, capture=None):
        optimizer.step(closure)
    assert caught.value.cause != "update"


def test_parameters_of_a_group_that_is_added_are_looked_at():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
    with pytest.raises(eg.WatchError) as caught, eg.watch(model, optimizer, capture=None):
        optimizer.add_param_group({"params": model[0].parameters(), "lr": float("inf")})
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    assert caught.value.place.startswith("0.")


def test_a_watch_belongs_to_the_thread_that_enters_it():
    model = torch.nn.Linear(2, 1)
    watch, found = eg.watch(model, capture=None), []

    def enter():
        try:
            with watch:
                model(torch.tensor([[1.0, float("nan")]]))
        except eg.WatchError as error:
            found.append(error.place)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert found == ["input[0, 1]"]


def test_a_scaler_in_another_thread_hides_nothing():
    model = torch.nn.Linear(2, 1)
    scaler = torch.amp.GradScaler("cpu")
    with pytest.raises(eg.WatchError) as caught, eg.watch(model, capture=None):
        thread = threading.Thread(target=scaler.scale, args=(torch.ones(1),))
        thread.start()
        thread.join()
        (model(torch.ones(1, 2)) * torch.inf).sum().backward()
    assert caught.value.cause == "outside"


def test_a_report_in_another_thread_leaves_no_watch_blind():
    running, reporting, returned, reported = [threading.Event() for _ in range(4)]
    found = []

    class Reported(torch.nn.Linear):
        calls = 0

        def forward(self, x):
            self.calls += 1
            if self.calls == 2:  # that of the report
                reporting.set()
                returned.wait(20)
            return super().forward(x)

    class Running(torch.nn.Linear):
        def forward(self, x):
            if not running.is_set():
                running.set()
                reporting.wait(20)
            return super().forward(x)

    def train():
        model = Running(2, 1)
        try:
            with eg.watch(model, capture=None):
                model(torch.ones(1, 2))  # returns while the report is made
                returned.set()
                reported.wait(20)
                model(torch.tensor([[1.0, float("nan")]]))
        except eg.WatchError as error:
            found.append(error.place)

    thread = threading.Thread(target=train)
    thread.start()
    model = Reported(2, 1)
    with pytest.raises(eg.WatchError), eg.watch(model, capture=None):
        running.wait(20)
        model(torch.full((1, 2), float("inf")))
    reported.set()
    thread.join()
    assert model.calls > 1
    assert returned.is_set()
    assert found == ["x[0, 1]"]


def test_outputs_of_one_element_and_keys_with_dots_are_captured(capture):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = torch.nn.Linear(1, 1)

        def forward(self, batch):
            return self.fc(batch["a.b"]) / batch["a"]["b"]

    model = Model()
    batch = {"a.b": torch.full((1, 1), 2.0), "a": {"b": torch.zeros(1, 1)}}
    with pytest.raises(eg.WatchError) as caught, eg.watch(model, capture=capture) as watch:
        model(batch).sum().backward()
    assert caught.value.capture == capture
    assert watch.replay(capture).same


@pytest.mark.parametrize("through_data", [False, True])
def test_an_infinity_that_a_saturated_layer_hides_is_not_blamed_on_the_optimizer(through_data, capture):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(8, 6)
    with pytest.raises(eg.WatchError) as caught, eg.watch(model, optimizer, capture=capture):
        for step in range(4):
            optimizer.zero_grad()
            if step == 2:
                weight = model[0].weight
                (weight.data if through_data else weight.detach())[3, 4] = torch.inf
            model(x).square().mean().backward()
            optimizer.step()
    assert str(caught.value).startswith("step 2: 0.weight[3, 4] is inf before the step")
    assert caught.value.cause == "bad-parameter"


class Lossy(torch.nn.Module):
    """Returns its loss, and the logits that it is of, as models of Hugging Face do."""

    def __init__(self, logits_of, loss_of):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)
        self.logits_of, self.loss_of = logits_of, loss_of

    def forward(self, x):
        logits = self.last(self.logits_of(self.first(x)))
        return {"loss": self.loss_of(logits), "logits": logits, "again": logits}


def rooted(x):
    return (x - x.detach()).sqrt()


def mean_square(x):
    return x.square().mean()


@pytest.mark.parametrize(("outside", "where"), [(False, "logits"), (True, "logits"), (False, "loss"), (True, "loss")])
def test_a_gradient_between_two_outputs_counts_once_and_belongs_to_the_model(capture, outside, where):
    square = torch.square
    model = Lossy(rooted, mean_square) if where == "logits" else Lossy(square, lambda x: rooted(x).sum())
    with pytest.raises(eg.WatchError) as caught, eg.watch(model, capture=capture) as watch:
        out = model(torch.ones(2, 3))
        loss = out["loss"] + (out["logits"].square().sum() if outside else 0)
        loss.backward()
    assert caught.value.cause == "singular"
    assert caught.value.where == f"test_watch_torch.py:{rooted.__code__.co_firstlineno + 1}"
    assert watch.replay().same


def test_a_bad_gradient_from_outside_is_told_from_those_between_outputs(capture):
    model = Lossy(torch.square, mean_square)
    with pytest.raises(eg.WatchError) as caught, eg.watch(model, capture=capture) as watch:
        out = model(torch.ones(2, 3))
        (out["loss"] + rooted(out["logits"]).sum()).backward()
    assert (caught.value.cause, str(caught.value.place)) == ("outside", "output.logits[0, 0]")
    assert watch.replay().same
