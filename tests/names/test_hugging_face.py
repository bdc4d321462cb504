"""Hugging Face's models, from a config and with random weights: logits, blocks, embeddings and single weights."""

import pytest
import torch

import elementgrad as eg
from tests.names.test_modules import assert_close

transformers = pytest.importorskip("transformers", reason="Hugging Face's models come with the newest set of packages")


def gpt2():
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=3, n_embd=8, n_head=2, vocab_size=11, n_positions=8, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config).double().eval(), torch.tensor([[3, 1, 4, 1, 5]])


def bert():
    torch.manual_seed(0)
    config = transformers.BertConfig(
        num_hidden_layers=2,
        hidden_size=8,
        num_attention_heads=2,
        intermediate_size=12,
        vocab_size=11,
        max_position_embeddings=8,
    )
    return transformers.BertForMaskedLM(config).double().eval(), torch.tensor([[3, 1, 4, 1, 5]])


MODELS = {"gpt2": gpt2, "bert": bert}
BLOCKS = [
    *[("gpt2", name) for name in ("transformer.h.0", "transformer.h.1", "transformer.h.2", "transformer.h.1.attn")],
    *[("gpt2", name) for name in ("transformer.wte", "transformer.h.2.mlp.act", "transformer:last_hidden_state")],
    *[("bert", f"bert.encoder.layer.{name}") for name in ("0", "1", "0.attention.self", "1.intermediate")],
    *[("bert", name) for name in ("bert.embeddings.word_embeddings", "bert.embeddings", "cls")],
]


@pytest.mark.parametrize(("which", "name"), BLOCKS)
def test_logits_to_any_block(which, name):
    model, ids = MODELS[which]()
    logits = model(ids).logits
    taken = {}

    def hook(module, args, result):
        taken["value"] = result if isinstance(result, torch.Tensor) else result[0]

    with model.get_submodule(name.partition(":")[0]).register_forward_hook(hook):
        logits = model(ids).logits
    (expected,) = torch.autograd.grad(logits[0, -1, 7], taken["value"], retain_graph=True)
    assert_close(eg.grad(model, ids, of="output.logits[0, -1, 7]", wrt=name), expected)
    J = eg.jacobian(model, ids, of="output.logits", wrt=name)
    column = (0,) * expected.dim()
    rows = [torch.autograd.grad(y, taken["value"], retain_graph=True)[0][column] for y in logits.flatten()]
    assert_close(J[:, column], torch.stack(rows).reshape(logits.shape))


def test_a_single_weight_and_a_token_embedding():
    model, ids = gpt2()
    weight = model.transformer.h[1].attn.c_attn.weight
    logits = model(ids).logits
    expected, rows = torch.autograd.grad(logits[0, 2, 3], [weight, model.transformer.wte.weight])
    given = eg.grad(
        model,
        ids,
        of="output.logits[0, 2, 3]",
        wrt=("transformer.h.1.attn.c_attn.weight[5, 17]", "transformer.wte.weight[4]"),
    )
    assert_close(given[0], expected[5, 17])
    assert_close(given[1], rows[4])  # the head shares it, so a token that stands nowhere before has a gradient too
    tied = eg.grad(model, ids, of="output.logits[0, 2, 3]", wrt="lm_head.weight[4]")
    assert_close(tied, rows[4])


def test_derivatives_between_blocks_with_keyword_arguments():
    model, ids = bert()
    mask = torch.tensor([[1, 1, 1, 1, 0]])
    J = eg.jacobian(
        model,
        kwargs={"input_ids": ids, "attention_mask": mask},
        of="bert.encoder.layer.1[0, 0]",
        wrt="bert.encoder.layer.0",
    )
    dense = J.dense()
    assert dense.shape == (8, 1, 5, 8)
    assert dense[:, 0, 4].abs().max() == 0  # nobody looks at a masked token
    assert dense[:, 0, 1].abs().max() > 0


def test_checkpointed_blocks_in_training():
    model, ids = gpt2()
    before = eg.jacobian(model, ids, of="output.logits[0, -1, 7]", wrt="transformer.h.1").dense()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    model.train()
    for dense in (
        eg.jacobian(model, ids, of="output.logits[0, -1, 7]", wrt="transformer.h.1").dense(),
        eg.jacobian(
            model, ids, kwargs={"use_cache": False}, of="output.logits[0, -1, 7]", wrt="transformer.h.1"
        ).dense(),
    ):
        assert_close(dense, before)


def test_names_of_outputs():
    model, ids = gpt2()
    named = {row.name: row for row in eg.names(model, ids)}
    assert named["output.logits"].shape == (1, 5, 11)
    assert named["transformer.h.1"].kind == "activation"
    assert named["transformer.wte.weight"].kind == "parameter"
    assert "lm_head.weight" not in named  # the same tensor, under its first name
