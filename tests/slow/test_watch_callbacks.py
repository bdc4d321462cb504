"""Runs of Hugging Face's Trainer and of Lightning, watched by their callbacks."""

import gc

import pytest
import torch

import elementgrad as eg
from elementgrad.callbacks import LightningWatch, TrainerWatch


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("fault", ["parameter", "the user's own"])
def test_a_run_of_the_trainer_is_stopped_and_leaves_nothing(fault, tmp_path):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=20, n_positions=8)
    model = transformers.GPT2LMHeadModel(config)

    class Injection(transformers.TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 2 and fault == "parameter":
                model.transformer.h[0].mlp.c_fc.weight.data[3, 4] = float("nan")
            elif state.global_step == 2:
                raise KeyError(fault)

    ids = [torch.arange(6) for _ in range(32)]
    options = {"max_steps": 5, "gradient_accumulation_steps": 2, "report_to": [], "use_cpu": True, "disable_tqdm": True}
    arguments = transformers.TrainingArguments(str(tmp_path), save_strategy="no", **options)
    data = [{"input_ids": x, "labels": x} for x in ids]
    watch = TrainerWatch(capture=tmp_path / "nan.capture")
    trainer = transformers.Trainer(model, arguments, train_dataset=data, callbacks=[watch, Injection()])
    with pytest.raises(eg.WatchError if fault == "parameter" else KeyError):
        trainer.train()
    gc.collect()
    assert vars(model).get("_compiled_call_impl") is None
    if fault == "parameter":
        assert (watch.error.step, watch.error.place) == (2, "transformer.h.0.mlp.c_fc.weight[3, 4]")
        assert watch.replay().same


@pytest.mark.filterwarnings("ignore")
def test_a_run_of_lightning_is_stopped_and_leaves_nothing(tmp_path):
    lightning = pytest.importorskip("lightning.pytorch")

    class Net(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.inner = torch.nn.Linear(3, 1)

        def forward(self, x):
            return self.inner(x)

        def training_step(self, batch, number):
            return self(batch * float("nan") if number == 3 else batch).square().mean()

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters())

    model, watch = Net(), LightningWatch(capture=tmp_path / "nan.capture")
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", callbacks=[watch], **quiet)
    with pytest.raises(eg.WatchError):
        trainer.fit(model, torch.utils.data.DataLoader(torch.randn(16, 3), batch_size=2))
    assert (watch.error.step, watch.error.place, watch.error.cause) == (3, "x[0, 0]", "bad-input")
    assert watch.replay().same
    assert "_compiled_call_impl" not in vars(model)
