"""Patches in the formats of others: PEFT loads what we write, and we read what PEFT writes."""

import copy
import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import elementgrad as eg
from elementgrad._train.patch import Patch
from elementgrad._train.patch_file import StoredTensor, pack_safetensors


@pytest.fixture
def model():
    torch.manual_seed(0)

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.nn.Embedding(30, 8)
            self.first = torch.nn.Linear(8, 8)
            self.second = torch.nn.Linear(8, 8)

        def forward(self, tokens):
            return self.second(self.first(self.table(tokens)).relu())

    return Net()


TOKENS = torch.arange(30)


def moved(model, change):
    other = copy.deepcopy(model)
    with torch.no_grad():
        change(other)
    return other, eg.diff(model, other)


def test_the_flat_layout_is_read_in_ten_lines(model, tmp_path):
    other, patch = moved(model, lambda m: (m.first.weight.view(-1)[::5].mul_(2), m.table.weight[3].add_(1)))
    patch.write(tmp_path / "flat.safetensors", format="flat")
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with safe_open(tmp_path / "flat.safetensors", framework="pt") as file:
        for key in file.keys():  # noqa: SIM118
            if key.endswith(".indices"):
                name = key.removesuffix(".indices")
                state[name].view(-1)[file.get_tensor(key)] = file.get_tensor(f"{name}.values")
    assert all(torch.equal(tensor, other.state_dict()[name]) for name, tensor in state.items())
    again = Patch.read(tmp_path / "flat.safetensors", model)
    marks = [{each.name: (each.values, each.originals, each.fingerprint) for each in p.entries} for p in (patch, again)]
    assert marks[0] == marks[1]
    assert eg.diff(eg.apply(model.state_dict(), again), other).size == 0


def test_textual_inversions_are_rows_of_a_table(model, tmp_path):
    other, patch = moved(model, lambda m: m.table.weight[28:].add_(1))
    patch.write(tmp_path / "cat.safetensors", format="textual-inversion", token="<cat>")
    loaded = load_file(tmp_path / "cat.safetensors")
    assert list(loaded) == ["<cat>"]
    assert torch.equal(loaded["<cat>"], other.table.weight[28:])
    again = Patch.read(tmp_path / "cat.safetensors", model, place="table.weight[28:]")
    assert again.size == 16
    assert eg.diff(eg.apply(model.state_dict(), again), other).size == 0


@pytest.mark.parametrize("whole", [True, False])
def test_peft_loads_trainable_tokens_that_we_write(model, tmp_path, whole):
    peft = pytest.importorskip("peft", reason="needs peft")

    def change(m):
        for row in (3, 7):
            m.table.weight[row, : None if whole else 5] *= 3

    other, patch = moved(model, change)
    patch.write(tmp_path / "adapter", format="trainable-tokens", base=None if whole else model)
    loaded = peft.PeftModel.from_pretrained(copy.deepcopy(model), tmp_path / "adapter")
    assert torch.equal(loaded(TOKENS), other(TOKENS))
    assert eg.diff(eg.apply(model.state_dict(), Patch.read(tmp_path / "adapter", model)), other).size == 0


def test_we_read_trainable_tokens_that_peft_writes(model, tmp_path):
    peft = pytest.importorskip("peft", reason="needs peft")
    config = peft.TrainableTokensConfig(token_indices=[3, 7], target_modules=["table"])
    trained = peft.get_peft_model(copy.deepcopy(model), config)
    with torch.no_grad():
        trained.base_model.model.table.trainable_tokens_delta["default"].add_(1)
    trained.save_pretrained(tmp_path / "adapter")
    patch = Patch.read(tmp_path / "adapter", model)
    assert patch.size == 16
    eg.apply(model, patch)
    assert torch.equal(trained(TOKENS), model(TOKENS))


def test_peft_loads_shira_that_we_write(model, tmp_path):
    peft = pytest.importorskip("peft", reason="needs peft")

    def change(m):
        m.first.weight.view(-1)[::5] *= 1.5
        m.second.weight[2, 3] *= 0.75

    other, patch = moved(model, change)
    patch.write(tmp_path / "adapter", format="shira")
    loaded = peft.PeftModel.from_pretrained(copy.deepcopy(model), tmp_path / "adapter")
    assert torch.equal(loaded(TOKENS), other(TOKENS))
    again = Patch.read(tmp_path / "adapter", model)
    assert again.size == patch.size
    assert eg.diff(eg.apply(model.state_dict(), again), other).size == 0


def test_we_read_shira_that_peft_writes(model, tmp_path):
    peft = pytest.importorskip("peft", reason="needs peft")
    config = peft.ShiraConfig(r=2, target_modules=["first", "second"], random_seed=0)
    trained = peft.get_peft_model(copy.deepcopy(model), config)
    with torch.no_grad():
        for name, parameter in trained.named_parameters():
            if "shira" in name:
                parameter.normal_()
    trained.save_pretrained(tmp_path / "adapter")
    patch = Patch.read(tmp_path / "adapter", model)
    assert patch.size == 2 * 2 * 16
    eg.apply(model, patch)
    assert torch.equal(trained(TOKENS), model(TOKENS))


def test_patches_that_no_format_can_hold_are_refused(model, tmp_path):
    _, rows = moved(model, lambda m: m.table.weight[3, :5].add_(1))
    _, bias = moved(model, lambda m: m.first.bias.add_(1))
    path = tmp_path / "out"
    for patch, options, says in (
        (rows, {"format": "lora"}, "format='lora' is none of flat, trainable-tokens"),
        (rows, {"format": "flat", "token": "x"}, "token= is the name of the token of a textual inversion"),
        (rows, {"format": "textual-inversion"}, "token= is the name of the token"),
        (rows, {"format": "trainable-tokens"}, "changes 5 of 8 elements of its rows, and this format has whole rows"),
        (bias, {"format": "trainable-tokens"}, "changes first.bias, and this format is for rows of one table"),
        (bias, {"format": "shira"}, "SHiRA adds to matrices"),
    ):
        with pytest.raises((eg.PatchError, eg.OptionError), match=says):
            patch.write(path, **options)
        assert not path.exists()
    path.mkdir()
    with pytest.raises(eg.OptionError, match="is there already; give a new folder"):
        rows.write(path, format="trainable-tokens", base=model)
    with pytest.raises(eg.PatchError, match=r"has no adapter_config\.json with a peft_type"):
        Patch.read(path, model)
    (path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    with pytest.raises(
        eg.PatchError, match=r"an adapter of type LORA; merge it .* eg.diff\(base, merged\) is the patch"
    ):
        Patch.read(path, model)
    save_file({"x": torch.zeros(2)}, tmp_path / "x.safetensors")
    with pytest.raises(eg.PatchError, match="of a textual inversion give place="):
        Patch.read(tmp_path / "x.safetensors", model)
    for positions, name, says in (
        ([1, 500], "first.weight", "first.weight has 64 elements"),
        ([1], "other", "no tensor named 'other'"),
    ):
        save_file(
            {f"{name}.indices": torch.tensor(positions), f"{name}.values": torch.zeros(len(positions))},
            tmp_path / "x.safetensors",
        )
        with pytest.raises(eg.PatchError, match=says):
            Patch.read(tmp_path / "x.safetensors", model)


FOREIGN = {
    "flat": ("patch.safetensors", "patch.safetensors", {}, {}),
    "textual-inversion": (
        "patch.safetensors",
        "patch.safetensors",
        {"token": "<cat>"},
        {"place": "table.weight[28:]"},
    ),
    "trainable-tokens": ("adapter", "adapter/adapter_model.safetensors", {}, {}),
    "trainable-tokens config": ("adapter", "adapter/adapter_config.json", {}, {}),
    "shira": ("adapter", "adapter/adapter_model.safetensors", {}, {}),
    "shira config": ("adapter", "adapter/adapter_config.json", {}, {}),
}


@pytest.mark.parametrize("case", FOREIGN)
def test_every_byte_that_changes_in_another_format_is_refused_or_harmless(model, tmp_path, case):
    target, file, write, read = FOREIGN[case]
    base = {"table.weight": model.table.weight.detach().numpy()[:, :2]}
    new = {"table.weight": base["table.weight"].copy()}
    new["table.weight"][28:] += 1
    patch = eg.diff(base, new)
    patch.write(tmp_path / target, format=case.split()[0], **write)
    wanted = eg.apply(base, Patch.read(tmp_path / target, base, **read))["table.weight"].tobytes()
    content = (tmp_path / file).read_bytes()
    refused = 0
    for position, byte in enumerate(content):
        flipped = byte ^ (1 << position % 8)
        (tmp_path / file).write_bytes(content[:position] + bytes([flipped]) + content[position + 1 :])
        try:
            again = Patch.read(tmp_path / target, base, **read)
        except eg.PatchError:
            refused += 1
        else:
            assert eg.apply(base, again)["table.weight"].tobytes() == wanted, position
    assert refused > len(content) / 2


def tie(model):
    """Add a head that is tied to the table; PEFT writes the rows of such a table once for each of its names."""
    model.head = torch.nn.Linear(8, 30, bias=False)
    model.head.weight = model.table.weight
    return model


def write_tied(folder, head):
    deltas = {"head": head, "table": torch.arange(16.0).reshape(2, 8)}
    tensors = {f"base_model.model.{name}.trainable_tokens_delta": delta for name, delta in deltas.items()}
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "TRAINABLE_TOKENS", "token_indices": [3, 7]}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def test_tokens_of_a_tied_table_are_read_once(model, tmp_path):
    write_tied(tmp_path, torch.arange(16.0).reshape(2, 8))
    untied = {name: tensor.clone() for name, tensor in model.state_dict().items()}  # as checkpoints leave the head out
    patch = Patch.read(tmp_path, tie(model))
    eg.apply(model, patch)
    assert torch.equal(model.head.weight[[3, 7]], torch.arange(16.0).reshape(2, 8))
    assert torch.equal(eg.apply(untied, Patch.read(tmp_path, untied))["table.weight"], model.table.weight)


def test_tied_tables_with_other_tokens_each_are_refused(model, tmp_path):
    write_tied(tmp_path, torch.ones(2, 8))
    with pytest.raises(eg.PatchError, match=r"the base has no tensor named 'head.weight'"):
        Patch.read(tmp_path, model)
    with pytest.raises(eg.PatchError, match=r"are one tensor of the base, and the file changes them differently"):
        Patch.read(tmp_path, tie(model))


@pytest.mark.parametrize(
    ("tensors", "rows", "text"),
    [
        ({"table.trainable_tokens_delta": torch.ones(1, 8)}, None, "token_indices in adapter_config.json are not"),
        ({"table.trainable_tokens_delta": torch.ones(1, 8)}, [1.5], "token_indices in adapter_config.json are not"),
        ({"table.trainable_tokens_delta": torch.ones(1, 8)}, [30], "which has 30 of them"),
        ({"table.trainable_tokens_delta": torch.ones(2, 8)}, [3, 3], "changes an element twice"),
        ({"table.trainable_tokens_delta": torch.ones(1, 8, dtype=torch.float8_e5m2)}, [3], "cannot be rounded"),
        ({"first.shira_weight": torch.ones(3)}, [], "has no base_model.model.first.shira_indices"),
        ({"first.shira_weight": torch.ones(1), "first.shira_indices": torch.tensor([[8], [0]])}, [], "not rows and"),
        ({"first.shira_weight": torch.ones(1), "first.shira_indices": torch.tensor([[-1], [0]])}, [], "not rows and"),
        ({"first.shira_weight": torch.ones(1), "first.shira_indices": torch.tensor([1, 2, 3])}, [], "not rows and"),
        ({"first.shira_weight": torch.ones(1), "first.shira_indices": torch.tensor([[0.5], [0]])}, [], "not integers"),
        ({"first.shira_weight": torch.ones(2), "first.shira_indices": torch.tensor([[1], [0]])}, [], "and 2 values"),
    ],
)
def test_adapters_that_do_not_fit_the_model_are_refused_in_a_sentence(model, tmp_path, tensors, rows, text):
    kind = "SHIRA" if "first.shira_weight" in tensors else "TRAINABLE_TOKENS"
    config = {"peft_type": kind} | ({} if rows is None else {"token_indices": rows})
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    names = {torch.float32: "F32", torch.int64: "I64", torch.float8_e5m2: "F8_E5M2"}  # old safetensors lacks the last
    stored = {
        f"base_model.model.{name}": StoredTensor(names[x.dtype], tuple(x.shape), x.view(torch.uint8).numpy().tobytes())
        for name, x in tensors.items()
    }
    (tmp_path / "adapter_model.safetensors").write_bytes(b"".join(map(bytes, pack_safetensors(stored))))
    with pytest.raises(eg.PatchError, match=text):
        Patch.read(tmp_path, model)
