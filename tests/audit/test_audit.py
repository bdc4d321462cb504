"""`eg.audit` on PyTorch: what it finds, what it notes, and what it leaves as it was."""

import copy
import json

import pytest
import torch
from torch import nn

import elementgrad as eg

X = torch.randn(16, 6, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """A trunk, a side branch and a head; `change` is done to what the trunk returns."""

    def __init__(self, change=lambda h: h):
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8))
        self.side, self.head = nn.Linear(6, 1), nn.Linear(8, 1)
        self.change = change

    def forward(self, x):
        return self.head(self.change(self.trunk(x))) + self.side(x)


TRUNK = ("trunk.0.weight", "trunk.0.bias", "trunk.2.weight", "trunk.2.bias")


def loss(model):
    return model(X).square().mean()


def mlp(activation=nn.ReLU, width=16):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, width), activation(), nn.Linear(width, 1))


def names(findings):
    return [name for finding in findings for name in finding.parameters]


def test_a_healthy_model_has_no_findings_and_one_run():
    model, runs = Net(), []
    audit = eg.audit(model, lambda model: runs.append(1) or loss(model))
    assert audit.ok
    assert audit
    assert not audit.findings
    assert len(runs) == 1
    assert audit.parameters == tuple(name for name, _ in model.named_parameters())
    assert str(audit) == "all 8 parameters learn."


def test_a_detached_trunk_is_one_finding_with_its_line_and_fix():
    audit = eg.audit(Net(lambda h: h.detach()), loss)
    (finding,) = audit.findings
    assert (finding.problem, finding.cause, finding.parameters) == ("no gradient", "detached", TRUNK)
    assert finding.where.startswith("test_audit.py:")
    assert "leave detach out" in finding.fix
    assert finding.diagnosis.verdict == "unconnected"
    for name in TRUNK:
        assert f"{name} " in str(audit)
    assert str(audit).count(finding.where) == 5  # a row for each parameter, and the sentence
    assert not audit


def test_a_block_without_gradients_is_one_finding_at_the_line_that_begins_it():
    class Blocked(Net):
        def forward(self, x):
            with torch.no_grad():
                h = self.trunk[0](x)
                h = self.trunk[2](torch.tanh(h))
            return self.head(h) + self.side(x)

    (finding,) = eg.audit(Blocked(), loss).findings
    assert (finding.cause, finding.parameters) == ("no-grad", TRUNK)
    assert finding.where == f"test_audit.py:{Blocked.forward.__code__.co_firstlineno + 1}"


def test_inference_mode_is_one_finding_at_its_first_operation():
    class Inferred(Net):
        def forward(self, x):
            with torch.no_grad():
                x = x + 1
            with torch.inference_mode():
                h = self.trunk[0](x)
                h = self.trunk[2](torch.tanh(h))
            return self.head(h.clone()) + self.side(x)

    (finding,) = eg.audit(Inferred(), loss).findings
    assert (finding.cause, finding.parameters) == ("no-grad", TRUNK)
    assert "inference" in str(finding.evidence)
    assert finding.where == f"test_audit.py:{Inferred.forward.__code__.co_firstlineno + 4}"


def test_zeros_that_one_operation_makes_are_one_finding_on_both_sides_of_it():
    (finding,) = eg.audit(Net(lambda h: torch.relu(h - 100)), loss).findings
    assert (finding.problem, finding.cause) == ("zero", "dead-relu")
    assert finding.parameters == (*TRUNK, "head.weight")


def test_what_is_not_used_is_grouped_by_the_results_that_it_leads_to():
    class Unused(Net):
        def __init__(self):
            super().__init__()
            self.other, self.spare = nn.Linear(6, 6), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))

        def forward(self, x):
            self.trunk(self.other(x))
            return self.side(x)

    findings = eg.audit(Unused(), loss).findings
    assert {finding.cause for finding in findings} == {"unused"}
    used, head, spare = sorted(findings, key=lambda finding: -len(finding.parameters))[:1] + [
        next(each for each in findings if each.parameters[0].startswith(prefix)) for prefix in ("head", "spare")
    ]
    assert set(used.parameters) == {*TRUNK, "other.weight", "other.bias"}
    assert used.where
    assert head.parameters == ("head.weight", "head.bias")
    assert head.where is None
    assert spare.parameters == ("spare.0.weight", "spare.0.bias", "spare.1.weight", "spare.1.bias")


def test_a_loss_that_is_not_finite_is_one_finding_about_all():
    (finding,) = eg.audit(Net(lambda h: torch.log(h * 0)), loss).findings
    assert finding.problem == "not finite"
    assert finding.cause == "singular"
    assert len(finding.parameters) == 8


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("as_step", [False, True])
def test_a_number_that_is_bad_before_anything_runs_is_named_as_the_cause(as_step, frozen):
    model = Net()
    model.trunk[2].weight.data[3, 4] = torch.nan
    model.trunk[2].weight.requires_grad_(not frozen)
    (finding,) = eg.audit(model, (lambda: loss(model).backward()) if as_step else loss).findings
    assert (finding.problem, finding.cause, finding.module) == ("not finite", "bad-parameter", "trunk.2")
    assert finding.reason == "trunk.2.weight[3, 4] is nan before the model runs"
    assert finding.where.startswith("test_audit.py:")
    bad = X.clone()
    bad[1, 2] = torch.inf
    (finding,) = eg.audit(Net(), lambda model: model(bad).square().mean()).findings
    assert (finding.cause, finding.reason) == (
        "bad-input",
        "an input of linear[1, 2] is inf before the model runs",
    )


def test_a_bad_buffer_is_named_too_and_so_are_parameters_of_keras_and_jax():
    normalised = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)).eval()
    normalised[1].running_var[2] = torch.nan
    (finding,) = eg.audit(normalised, loss).findings
    assert finding.reason == "1.running_var[2] is nan before the model runs"

    keras, tf = pytest.importorskip("keras"), pytest.importorskip("tensorflow")
    dense = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4, name="a"), keras.layers.Dense(1, name="b")])
    kernel = dense.layers[0].kernel.numpy()
    kernel[5, 1] = float("inf")
    dense.layers[0].kernel.assign(kernel)
    (finding,) = eg.audit(dense, lambda model: tf.reduce_mean(tf.square(model(X.numpy())))).findings
    assert (finding.cause, finding.reason) == ("bad-parameter", "a/kernel[5, 1] is inf before the model runs")

    jax = pytest.importorskip("jax")
    params = {"w": jax.numpy.ones((3, 2)).at[2, 1].set(jax.numpy.nan), "b": jax.numpy.zeros(2)}
    for wrap in (jax.jit, lambda f: f):  # the gradients are finite
        compiled = wrap(lambda params: (jax.numpy.ones((4, 3)) @ params["w"] + params["b"]).mean())
        (finding,) = eg.audit(params, compiled).findings
        assert (finding.cause, finding.reason) == ("bad-parameter", "w[2, 1] is nan before the model runs")
    (finding,) = eg.audit(Net(), lambda model: torch.log(-model(X).abs()).mean()).findings
    assert (finding.cause, finding.operation, len(finding.parameters)) == ("singular", "log", 8)


@pytest.mark.parametrize(
    ("change", "cause", "reason"),
    [
        (lambda out: nn.functional.cross_entropy(out, torch.full((12,), -100)), "singular", "cross_entropy"),
        (lambda out: (out.exp() * float("inf")).mean(), "bad-input", "a number given to mul is inf"),
        (
            lambda out: nn.functional.batch_norm(out, torch.zeros(3), torch.tensor([1.0, -1.0, 1.0])).sum(),
            "singular",
            "batch_norm",
        ),
    ],
)
def test_a_loss_that_is_not_finite_is_explained_by_the_operation_that_makes_it(change, cause, reason):
    audit = eg.audit(nn.Linear(6, 3), lambda model: change(model(X[:12])))
    (finding,) = audit.findings
    assert (finding.problem, finding.cause, finding.parameters) == ("not finite", cause, ("weight", "bias"))
    assert reason in finding.reason
    assert finding.where.startswith("test_audit.py:")


def test_a_model_that_the_loss_does_not_use_is_one_finding():
    audit = eg.audit(Net(), lambda model: mlp()(X).square().mean())
    (finding,) = audit.findings
    assert (finding.cause, len(finding.parameters)) == ("unused", 8)
    assert "except_" in finding.fix


def test_a_loss_that_cannot_be_followed_is_a_finding_all_the_same():
    audit = eg.audit(Net(), lambda model: loss(copy.deepcopy(model)))
    (finding,) = audit.findings
    assert (finding.problem, finding.cause, len(finding.parameters)) == ("no gradient", None, 8)
    assert "could not be followed" in finding.reason
    assert "deepcopy" in finding.reason


def test_an_error_of_the_user_is_not_hidden_by_a_missing_gradient():
    model = Net()

    def step(end):
        loss(model).detach().backward()
        end()

    def fail():
        raise KeyError("the user's own")

    with pytest.raises(KeyError, match="the user's own"):
        eg.audit(model, lambda: step(fail))
    audit = eg.audit(model, lambda: step(lambda: model.head.weight.grad.mul_(2)))
    assert audit.findings[0].cause == "detached"
    assert "the step then ended with AttributeError: 'NoneType' object" in str(audit.notes[0])

    keras, tf = pytest.importorskip("keras"), pytest.importorskip("tensorflow")
    dense = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])

    def keras_step(end):
        with tf.GradientTape() as tape:
            value = tf.reduce_sum(tf.stop_gradient(dense(X.numpy())))
        end(tape.gradient(value, dense.trainable_variables))

    with pytest.raises(KeyError, match="the user's own"):
        eg.audit(dense, lambda: keras_step(lambda gradients: fail()))
    audit = eg.audit(dense, lambda: keras_step(lambda gradients: gradients[0] * 2))
    assert "the step then ended with TypeError" in str(audit.notes[0])


def test_a_write_in_place_that_pytorch_refuses_is_a_finding():
    def modified(h):
        y = torch.sigmoid(h)
        z = y * 2
        y.add_(1)
        return z + y

    (finding,) = eg.audit(Net(modified), loss).findings
    assert finding.cause == "modified-in-place"
    assert len(finding.parameters) == 8


@pytest.mark.parametrize(
    ("break_unit", "activation", "cause"),
    [
        (lambda model: model[0].bias.data[3].fill_(-50), nn.ReLU, "dead-relu"),
        (lambda model: (model[0].weight.data[3].zero_(), model[0].bias.data[3].fill_(-1)), nn.ReLU, "dead-relu"),
        (lambda model: model[0].bias.data[3].fill_(-50), nn.ReLU6, "clamped"),
        (lambda model: model[0].bias.data[3].fill_(200), nn.Sigmoid, "saturated"),
        (lambda model: model[2].weight.data[:, 3].zero_(), nn.Tanh, "masked"),
    ],
)
def test_a_dead_unit_is_a_finding_with_its_bias(break_unit, activation, cause):
    model = mlp(activation)
    break_unit(model)
    (finding,) = eg.audit(model, loss).findings
    assert (finding.problem, finding.cause) == ("dead units", cause)
    assert finding.parameters == ("0.weight[3]", "0.bias[3]")
    assert finding.where.startswith("test_audit.py:")


def test_a_dead_channel_is_one_finding_through_its_normalisation():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(128, 2))
    model[1].bias.data[2] = -60
    image = torch.randn(4, 2, 6, 6)
    (finding,) = eg.audit(model, lambda model: model(image).square().mean()).findings
    assert finding.parameters == ("0.weight[2]", "0.bias[2]", "1.weight[2]", "1.bias[2]")


def test_units_that_another_batch_may_wake_are_a_note():
    audit = eg.audit(mlp(width=64), lambda model: model(X[:3]).square().mean())
    assert audit.ok
    assert [note.problem for note in audit.notes] == ["dead units"]


def test_a_dead_unit_of_a_square_layer_is_not_a_bias_that_cannot_move():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 1))
    with torch.no_grad():
        model[1].weight[1:3] = 0.0
        model[1].bias[1:3] = -0.1
    audit = eg.audit(model, lambda model: model(X[:, :5]).square().mean())
    assert "cannot move" not in [note.problem for note in audit.notes], str(audit)


def test_unused_rows_and_biases_that_nothing_moves_are_notes():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 6), nn.LayerNorm(6, elementwise_affine=False))
    model.append(nn.Flatten()).append(nn.BatchNorm1d(12, affine=False)).append(nn.Linear(12, 1))
    ids = torch.randint(5, (8, 2))
    audit = eg.audit(model, lambda model: model(ids).square().mean())
    assert audit.ok
    notes = {note.problem: note for note in audit.notes}
    assert notes["unused rows"].parameters == ("0.weight",)
    assert "of 9 rows" in notes["unused rows"].reason
    conv = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Tanh(), nn.Flatten(), nn.Linear(64, 1))
    image = torch.randn(8, 1, 6, 6)
    audit = eg.audit(conv, lambda model: model(image).square().mean())
    assert audit.ok
    assert [(note.problem, note.parameters) for note in audit.notes] == [("cannot move", ("0.bias",))]


def test_gradients_that_are_tiny_beside_their_neighbours_are_a_note():
    model = nn.Sequential(*[nn.Linear(6, 6) for _ in range(5)])

    def scaled(model):
        h = X
        for number, layer in enumerate(model):
            y = layer(h)
            h = y + 1e-6 * (layer.weight.sum() - layer.weight.detach().sum()) if number == 2 else y
            h = h.detach() + 1e-7 * (h - h.detach()) if number == 2 else h
            h = h + sum(other(X).tanh() for other in model[:2]) if number == 2 else h
        return h.square().mean()

    audit = eg.audit(model, scaled)
    assert audit.ok
    assert "2.weight" in names(note for note in audit.notes if note.problem == "tiny")


def test_frozen_and_excepted_parameters_are_no_findings():
    model = Net(lambda h: h.detach())
    model.trunk[0].requires_grad_(False)
    audit = eg.audit(model, loss, except_=["trunk.2"])
    assert audit.ok
    assert audit.frozen == ("trunk.0.weight", "trunk.0.bias")
    assert audit.excepted == ("trunk.2.weight", "trunk.2.bias")
    for text in ("trunk.*", "trunk", ["**.bias", "trunk.*.weight"]):
        assert eg.audit(Net(lambda h: h.detach()), loss, text).ok


def test_elements_that_train_are_looked_at_and_the_others_are_frozen():
    model = Net()
    elements = eg.trainable(model, ["trunk.0.weight[2, :]", "head.bias"])
    audit = eg.audit(model, loss)
    assert audit.ok
    assert set(audit.parameters) == {"trunk.0.weight[2, :]", "head.bias"}
    assert "trunk.0.weight" in audit.frozen
    assert "side.weight" in audit.frozen
    model.change = lambda h: h.detach()
    (finding,) = eg.audit(model, loss).findings
    assert finding.cause == "detached"
    assert finding.parameters == ("trunk.0.weight[2, :]",)
    elements.release()


def test_tied_weights_are_one_parameter():
    model = Net()
    model.side = nn.Linear(8, 1)
    model.side.weight = model.head.weight
    audit = eg.audit(model, lambda model: model.head(model.trunk(X)).square().mean(), except_="side.bias")
    assert audit.ok
    assert sum("weight" in name for name in audit.parameters) == 3


def test_behind_weights_that_start_at_zero_and_learn_a_parameter_waits():
    model = mlp(nn.Tanh)
    nn.init.zeros_(model[2].weight)
    audit = eg.audit(model, lambda model: (model(X) - 1).square().mean())
    assert audit.ok
    (note,) = audit.notes
    assert note.problem == "waits"
    assert note.parameters == ("0.weight", "0.bias")
    assert "2.weight" in note.reason
    nn.init.zeros_(model[0].weight)
    nn.init.zeros_(model[0].bias)
    assert set(names(eg.audit(model, lambda model: (model(X) - 1).square().mean()).findings)) == {
        *("0.weight", "0.bias", "2.weight")
    }


def test_behind_a_normalisation_with_weights_that_start_at_zero_a_parameter_waits():
    """As in residual blocks whose last normalisation starts at zero; its running mean is zero as well."""
    torch.manual_seed(0)
    block = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3))
    nn.init.zeros_(block[3].weight)
    x = torch.randn(4, 3, 5, 5)
    for _ in range(2):
        audit = eg.audit(block, lambda block: torch.tanh(x + block(x)).square().mean())
        assert audit.ok
        waits = [note for note in audit.notes if note.problem == "waits"]
        assert names(waits) == ["0.weight", "0.bias", "1.weight", "1.bias", "2.weight", "2.bias"]
        assert "3.weight" in waits[0].reason
        block.eval()


def test_zeros_of_another_operand_stop_nothing():
    """An `addmm` with a bias of zeros is stopped by its weights alone."""
    weight, bias = nn.Parameter(torch.zeros(8, 1)), nn.Parameter(torch.zeros(1))
    model = nn.ParameterDict({"a": nn.Parameter(torch.randn(6, 8)), "weight": weight, "bias": bias})
    audit = eg.audit(model, lambda p: (torch.addmm(p["bias"], X @ p["a"], p["weight"]) - 1).square().mean())
    (note,) = audit.notes
    assert (note.problem, note.parameters) == ("waits", ("a",))
    assert "such as weight" in note.reason


@pytest.mark.parametrize("scaled", [False, True])
def test_a_training_step_runs_as_it_is_and_leaves_everything_as_it_was(scaled):
    model = nn.Sequential(*Net(lambda h: h.detach()).trunk, nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
    scaler = torch.amp.GradScaler("cpu", enabled=scaled)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 7.0)
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()

    def step(cut=False):
        model.train()
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=scaled):
            h = model[:3](X)
            value = model[3:](h.detach() if cut else h).square().mean()
        scaler.scale(value).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    model.eval()
    assert eg.audit(model, lambda: step()).ok
    (finding,) = eg.audit(model, lambda: step(cut=True)).findings
    assert finding.cause == "detached"
    assert finding.parameters == ("0.weight", "0.bias", "2.weight", "2.bias")
    assert not model.training
    assert not optimizer.state
    assert not scaled or copy.deepcopy(scaler).state_dict() == scaler.state_dict()  # between steps it can be copied
    assert torch.equal(random, torch.get_rng_state())
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert all((parameter.grad == 7).all() for parameter in model.parameters())


def test_parameters_that_a_step_leaves_alone_count_no_write():
    model = Net()
    with torch.no_grad():
        model.side.weight[0, 0] = torch.nan
    before = [parameter._version for parameter in model.parameters()]
    assert not eg.audit(model, lambda: loss(model).backward()).ok
    assert [parameter._version for parameter in model.parameters()] == before


@pytest.mark.parametrize("ends", ["unscaled", "stepped", "updated"])
@pytest.mark.parametrize("fused", [False, True])
def test_a_scaler_is_ready_for_the_next_step_after_an_audit_of_one(ends, fused):
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    scaler = torch.amp.GradScaler("cpu")

    def step(cut=False):
        h = model.trunk(X)
        value = model.head(h.detach() if cut else h) + model.side(X)
        scaler.scale(value.square().mean()).backward()
        scaler.unscale_(optimizer)
        if ends != "unscaled":
            scaler.step(optimizer)
        if ends == "updated":
            scaler.update()

    (finding,) = eg.audit(model, lambda: step(cut=True)).findings
    assert finding.cause == "detached"
    assert eg.audit(model, lambda: step()).ok
    step()


def test_a_step_that_asks_for_some_gradients_alone_is_not_taken():
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    before = copy.deepcopy(model.state_dict())

    def step():
        loss(model).backward(inputs=list(model.head.parameters()))
        optimizer.step()

    (finding,) = eg.audit(model, step).findings
    assert "asks for the gradients of others alone" in finding.reason
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert not optimizer.state
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_step_on_a_loss_without_a_graph_is_explained():
    model = Net()
    (finding,) = eg.audit(model, lambda: loss(model).detach().backward()).findings
    assert finding.cause == "detached"
    assert len(finding.parameters) == 8


def test_a_compiled_model_runs_eagerly_and_a_note_says_so():
    model = torch.compile(Net(lambda h: h.detach()), backend="eager")
    audit = eg.audit(model, loss)
    assert audit.findings[0].parameters == TRUNK
    assert "ran eagerly" in str(audit.notes[0])


@pytest.mark.parametrize("on", ["parameter", "activation"])
def test_a_hook_that_makes_a_gradient_infinite_is_the_cause(on):
    model = Net()
    if on == "parameter":
        model.trunk[0].weight.register_hook(lambda g: g * float("nan"))
    else:
        model.trunk[0].register_forward_hook(lambda _, __, h: (h.register_hook(lambda g: g * float("inf")), h)[1])
    (finding,) = eg.audit(model, loss).findings
    assert (finding.problem, finding.cause) == ("not finite", "hook")
    assert finding.parameters == TRUNK[: 1 if on == "parameter" else 2]


def test_complex_parameters_are_named_in_a_note():
    model = nn.Linear(6, 2)
    model.spectrum = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    audit = eg.audit(model, loss)
    assert (audit.ok, audit.parameters) == (True, ("weight", "bias"))
    assert "complex parameters are not audited: spectrum" in str(audit)

    jax = pytest.importorskip("jax")
    params = {"w": jax.numpy.ones(3), "z": jax.numpy.ones(3, "complex64"), "key": jax.random.key(0)}
    audit = eg.audit(params, lambda params: (params["w"] ** 2).sum())
    assert "complex parameters are not audited: z" in str(audit)
    with pytest.raises(eg.DtypeError, match="only complex parameters, which are not audited"):
        eg.audit({"z": params["z"]}, lambda params: abs(params["z"]).sum())


def test_a_checkpoint_without_a_tracked_argument_is_a_finding():
    checkpoint = torch.utils.checkpoint.checkpoint
    for reentrant, ok in ((True, False), (False, True)):
        trunk, head = mlp(nn.Tanh), nn.Linear(1, 1)
        model = nn.ModuleList([trunk, head])

        def run(model, reentrant=reentrant):
            return model[1](checkpoint(model[0], X, use_reentrant=reentrant)).square().mean()

        audit = eg.audit(model, run)
        assert audit.ok is ok, str(audit)
        assert names(audit.findings) == ([] if ok else [name for name, _ in model.named_parameters() if name[0] == "0"])


def test_scripted_parts_of_a_model_are_looked_at():
    net = Net()
    net.trunk = torch.jit.script(net.trunk)
    assert eg.audit(net, loss).ok
    net.change = lambda h: h.detach()
    assert names(eg.audit(net, loss).findings) == list(TRUNK)


def test_a_hook_that_stops_gradients_is_a_finding():
    model = Net()
    model.side.weight.register_hook(torch.zeros_like)
    (finding,) = eg.audit(model, loss).findings
    assert finding.cause == "hook"
    assert finding.parameters == ("side.weight",)


def test_the_audit_is_json_and_html():
    audit = eg.audit(Net(lambda h: h.detach()), loss, except_="side.bias")
    fields = json.loads(audit.to_json())
    assert fields["ok"] is False
    assert fields["excepted"] == ["side.bias"]
    assert fields["findings"][0]["parameters"] == list(TRUNK)
    assert fields["findings"][0]["cause"] == "detached"
    html = audit._repr_html_()
    assert all(name in html for name in TRUNK)
    assert "detach cuts the gradient" in html


def test_a_report_shows_the_audit(tmp_path):
    page = eg.report(tmp_path / "audit.html", eg.audit(Net(lambda h: h.detach()), loss)).read_text()
    assert "Which parameters learn" in page
    assert all(name in page for name in TRUNK)


def test_adapters_of_peft_are_fine():
    peft = pytest.importorskip("peft", reason="peft is not installed here")
    model = peft.get_peft_model(Net(), peft.LoraConfig(r=2, target_modules=["0", "2"]))
    audit = eg.audit(model, loss)
    assert audit.ok
    assert len(audit.frozen) == 8
    assert [note.problem for note in audit.notes] == ["waits"]
    assert all("lora_A" in name for name in audit.notes[0].parameters)


def test_an_optimizer_with_a_closure_is_as_before_an_audit():
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters())

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(3, 2)).square().sum()
        loss.backward()
        return loss

    def step():
        optimizer.step(closure)

    before = [p.detach().clone() for p in model.parameters()]
    assert eg.audit(model, step).ok
    assert not optimizer.state
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


def test_a_single_row_with_dead_units_gives_no_warning_of_numpy():
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    with torch.no_grad():
        model[0].weight.zero_()
        model[0].bias.copy_(torch.tensor([-1.0, 1.0, 2.0, 3.0]))
    audit = eg.audit(model, lambda model: model(torch.ones(1, 3)).sum())
    assert [(note.problem, note.cause) for note in audit.notes] == [("dead units", "dead-relu")]


def test_a_scaler_that_backs_off_from_its_first_factor_is_no_finding():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 2))
    scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=2.0**24), torch.optim.SGD(model.parameters(), 0.1)
    x, before = torch.randn(4, 6), scaler.state_dict()
    runs = []

    def step():
        runs.append(scaler.get_scale())
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(x).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    assert eg.audit(model, step).ok
    assert len(runs) > 1
    assert scaler.state_dict() == before
    with torch.no_grad():
        model[0].weight[1, 2] = torch.inf
    assert [finding.problem for finding in eg.audit(model, step).findings] == ["not finite"]
    assert scaler.state_dict() == before


def test_scripted_submodules_are_said_and_lazy_ones_refused():
    class Scripted(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.inner = nn.Linear(3, 4), torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))

        def forward(self, x):
            return self.inner(self.first(x).detach())

    model = Scripted()
    model.inner[0].weight.data[1] = 1e3
    audit = eg.audit(model, lambda model: model(torch.ones(2, 3)).sum())
    assert audit.findings[0].parameters == ("first.weight", "first.bias")
    assert "inner is scripted" in str(audit)
    assert "inner.0.weight[1]; 1 parameter, dead units: what the model computes with it was not seen" in str(audit)
    with pytest.raises(eg.FrameworkError, match="weight has no shape yet; call the model once"):
        eg.audit(nn.LazyLinear(2), lambda model: model(torch.ones(2, 3)).sum())


@pytest.mark.parametrize("compiled", [False, True])
def test_dead_units_of_equinox_are_found_in_compiled_losses_too(compiled):
    jax, equinox = pytest.importorskip("jax"), pytest.importorskip("equinox")
    model = equinox.nn.MLP(6, 3, 8, 1, key=jax.random.key(0))
    model = equinox.tree_at(lambda model: model.layers[0].bias, model, model.layers[0].bias.at[3].set(-1e3))
    x = jax.random.normal(jax.random.key(1), (8, 6))

    def loss(model):
        return (jax.vmap(model)(x) ** 2).mean()

    (finding,) = eg.audit(model, equinox.filter_jit(loss) if compiled else loss).findings
    assert (finding.parameters, finding.cause) == (("layers.0.weight[3]", "layers.0.bias[3]"), "dead-relu")


def test_a_keras_model_without_variables_is_to_be_called_first():
    keras = pytest.importorskip("keras")
    with pytest.raises(eg.FrameworkError, match="is not built and has no variables yet; call it once"):
        eg.audit(keras.Sequential([keras.layers.Dense(2)]), lambda model: model)


def test_a_step_of_keras_that_asks_for_some_gradients_alone_is_said():
    keras, tf = pytest.importorskip("keras"), pytest.importorskip("tensorflow")
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, name="a"), keras.layers.Dense(1, name="b")])

    def step():
        with tf.GradientTape() as tape:
            value = tf.reduce_mean(model(tf.ones((4, 3))) ** 2)
        tape.gradient(value, model.trainable_variables[2:])

    (finding,) = eg.audit(model, step).findings
    assert (finding.cause, finding.parameters) == (None, ("a/kernel", "a/bias"))
    assert "asks for the gradients of others alone" in finding.reason


def test_the_biases_of_keys_cannot_move_in_keras_either():
    keras, tf = pytest.importorskip("keras"), pytest.importorskip("tensorflow")
    keras.utils.set_random_seed(0)
    x = tf.random.normal((3, 5, 8), seed=0)
    inputs = keras.Input((5, 8))
    attention = keras.layers.MultiHeadAttention(2, 4, name="attention")(inputs, inputs)
    model = keras.Model(inputs, keras.layers.Dense(2)(attention))
    (note,) = eg.audit(model, lambda model: tf.reduce_mean(model(x) ** 2)).notes
    assert (note.problem, note.parameters) == ("cannot move", ("attention/key/bias",))


def test_zeros_that_one_product_makes_are_one_finding_in_jax():
    jax = pytest.importorskip("jax")
    params = {"a": jax.numpy.ones((6, 4)), "b": jax.numpy.ones((4, 1))}
    x = jax.numpy.asarray(X.numpy())
    audit = eg.audit(params, lambda p: ((x @ p["a"]) * jax.numpy.zeros(4) @ p["b"] - 1).mean())
    (finding,) = audit.findings
    assert (finding.cause, finding.operation, finding.parameters) == ("masked", "multiply", ("a", "b"))


def test_attribute_paths_of_keras_are_names_that_may_be_excepted():
    keras, tf = pytest.importorskip("keras"), pytest.importorskip("tensorflow")

    class Blocks(keras.Model):
        def __init__(self):
            super().__init__()
            self.blocks = [keras.layers.Dense(3, activation="tanh") for _ in range(2)]

        def call(self, x):
            for block in self.blocks:
                x = block(x)
            return x

    model = Blocks()
    biases = [name for name in (str(row.name) for row in eg.names(model, tf.ones((2, 3)))) if name.endswith("/bias")]

    def loss(model):
        return tf.reduce_sum(model(tf.ones((2, 3))) ** 2)

    assert list(eg.audit(model, loss, except_="blocks.*.bias").excepted) == biases
    assert list(eg.audit(model, loss, except_=["blocks.1.bias"]).excepted) == biases[1:]
    assert len(eg.audit(model, loss, except_=["blocks.1"]).excepted) == 2


def test_a_table_that_a_compiled_function_returns_moved_is_no_table_alone():
    jax = pytest.importorskip("jax")
    jnp, transposed = jax.numpy, jax.jit(lambda w: w.T)
    params = {"w": jnp.ones((3, 4)).at[1].set(-100.0)}

    def loss(params):
        return jnp.mean(jax.nn.relu(jnp.ones((8, 4)) @ transposed(params["w"]))) + params["w"][0].sum()

    audit = eg.audit(params, loss)
    assert "unused rows" not in [note.problem for note in audit.notes], str(audit)
