"""Elements of Hugging Face models, whose code is as it is."""

import copy

import pytest
import torch

import elementgrad as eg

transformers = pytest.importorskip("transformers", reason="Hugging Face's models come with the newest set of packages")
TOKENS = torch.tensor([[3, 17, 4, 60], [5, 3, 9, 2]])


def gpt2():
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_size": 64, "n_positions": 16}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))


def bert():
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 20}
    return transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=64, max_position_embeddings=16, **sizes))


def llama():
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 20}
    config = transformers.LlamaConfig(vocab_size=64, num_key_value_heads=1, max_position_embeddings=16, **sizes)
    return transformers.LlamaForCausalLM(config)


def gemma():
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 20}
    config = transformers.Gemma3TextConfig(vocab_size=64, num_key_value_heads=1, head_dim=8, **sizes)
    return transformers.Gemma3ForCausalLM(config)


MODELS = {
    gpt2: [
        "transformer.wte.weight[3]",
        "transformer.h.0.attn.c_attn.weight[2, [0, 40]]",
        "transformer.h.1.ln_1.bias[2]",
    ],
    bert: ["bert.embeddings.word_embeddings.weight[9]", "bert.encoder.layer.0.attention.self.query.weight[:, 3]"],
    llama: ["model.embed_tokens.weight[17, 2]", "lm_head.weight[5]", "model.layers.0.input_layernorm.weight[1]"],
    gemma: ["model.embed_tokens.weight[17]", "model.layers.0.mlp.up_proj.weight[4, :3]"],
}


@pytest.mark.parametrize("make", MODELS)
def test_gradients_are_those_of_the_whole_model(make):
    torch.manual_seed(0)
    model = make().eval().double()
    plain = copy.deepcopy(model)
    frozen = copy.deepcopy(model).requires_grad_(False)
    elements = eg.trainable(model, MODELS[make])
    loss = model(TOKENS, labels=TOKENS).loss
    assert torch.equal(loss, frozen(TOKENS, labels=TOKENS).loss)
    loss.backward()
    plain(TOKENS, labels=TOKENS).loss.backward()
    named = dict(plain.named_parameters(remove_duplicate=False))
    for place in elements:
        gradient = named[place.name].grad
        expected = eg.at(gradient)[eg.Place.parse(str(place)).index].get().reshape(-1)
        assert expected.abs().max() > 0
        assert torch.allclose(elements[place].grad, expected, rtol=1e-12, atol=1e-12 * float(gradient.abs().max()))


def test_saved_and_loaded_as_any_model(tmp_path):
    torch.manual_seed(0)
    model = gpt2().eval()
    elements = eg.trainable(model, MODELS[gpt2])
    optimizer = torch.optim.AdamW(elements.parameters(), lr=0.1)
    model(TOKENS, labels=TOKENS).loss.backward()
    optimizer.step()
    model.save_pretrained(tmp_path)
    loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path).eval()
    assert torch.equal(loaded(TOKENS).logits, model(TOKENS).logits)
    assert loaded.lm_head.weight is loaded.transformer.wte.weight


def test_tied_weights_stay_tied_with_the_option():
    torch.manual_seed(0)
    model = gpt2()
    elements = eg.trainable(model, "lm_head.weight[3]")
    assert isinstance(model.get_parameter("lm_head.weight"), torch.nn.Parameter)
    model.tie_weights()
    model(TOKENS, labels=TOKENS).loss.backward()
    assert elements["transformer.wte.weight[3]"].grad.abs().max() > 0


def test_checkpointed_layers_of_a_transformer():
    torch.manual_seed(0)
    model = gpt2()
    for part in model.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0
    elements = eg.trainable(model, MODELS[gpt2])
    model.train()
    model(TOKENS, labels=TOKENS).loss.backward()
    expected = [leaf.grad.clone() for leaf in elements.parameters()]
    model.gradient_checkpointing_enable()
    model.zero_grad()
    model(TOKENS, labels=TOKENS).loss.backward()
    for leaf, gradient in zip(elements.parameters(), expected, strict=True):
        assert torch.allclose(leaf.grad, gradient, rtol=1e-5, atol=1e-8)
