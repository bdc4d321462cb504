"""New token rows of a GPT-2 under Hugging Face's Trainer and Accelerate, in one process or on every rank of several.

Started by torchrun it does everything once and leaves what each rank found in a folder, for the tests to look at.
"""

import os
import sys
from contextlib import redirect_stdout
from importlib import util
from io import StringIO
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed

import elementgrad as eg

KNOWN, NEW, WIDTH = 40, 3, 16
TABLE = "transformer.wte.weight"
ROWS = f"{TABLE}[{KNOWN}:, :]"
BATCH, STEPS = 8, 6
RATE, DECAY, NORM = 0.05, 0.3, 0.02
WORLD = int(os.environ.get("WORLD_SIZE", "1"))
TRAINER = {
    "trainer": {},
    "accumulated": {"gradient_accumulation_steps": 2},
    "checkpointed": {"gradient_checkpointing": True},
    "autocast": {"bf16": True},
}
"""Options of the Trainer, for each of its runs."""


def gpt2(seed=0, dtype=torch.float64):
    """A model with rows for new tokens, which are drawn at random."""
    config = GPT2Config(
        n_layer=2, n_head=2, n_embd=WIDTH, vocab_size=KNOWN, n_positions=8, bos_token_id=0, eos_token_id=0
    )
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    set_seed(seed)
    model = GPT2LMHeadModel(config)
    model.resize_token_embeddings(KNOWN + NEW)
    model.loss_type = "ForCausalLM"  # or the Trainer's mean counts first tokens too, which nothing predicts
    return model.to(dtype)


def lessons():
    """Sentences in which new tokens occur."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(KNOWN, (32, 8), generator=generator)
    tokens[:, 3] = KNOWN + torch.arange(32) % NEW
    return [{"input_ids": sentence, "labels": sentence} for sentence in tokens]


class Wire(TrainerCallback):
    """Counts the numbers of each reduction of gradients, and keeps a patch beside each checkpoint."""

    def __init__(self, elements):
        self.elements, self.sizes, self.trainer = elements, [], None

    def on_train_begin(self, args, state, control, **_):
        if isinstance(self.trainer.model_wrapped, DistributedDataParallel):
            self.trainer.model_wrapped.register_comm_hook(self.sizes, counted)

    def on_save(self, args, state, control, **_):
        if state.is_world_process_zero:
            self.elements.save(Path(args.output_dir, f"checkpoint-{state.global_step}", "rows.safetensors"))


def counted(sizes, bucket):
    sizes.append(bucket.buffer().numel())
    return allreduce_hook(None, bucket)


def with_trainer(folder, model, places=ROWS, resume=None, **options):
    """Train the rows with the Trainer."""
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    elements = eg.trainable(model, places)
    arguments = TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        per_device_train_batch_size=BATCH // WORLD // options.get("gradient_accumulation_steps", 1),
        train_sampling_strategy="sequential",
        max_steps=STEPS,
        save_steps=STEPS // 2,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        weight_decay=DECAY,
        max_grad_norm=NORM,
        disable_tqdm=True,
        report_to="none",
        logging_strategy="no",
        **options,
    )
    wire = Wire(elements)
    wire.trainer = trainer = Trainer(model, arguments, train_dataset=lessons(), callbacks=[wire])
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model(folder / "saved")
    trainer.save_state()
    return result(folder, model, elements, before) | {"sizes": wire.sizes}


def with_accelerate(folder, model, resume=None, micro=1):
    """Train the rows with a loop of one's own."""
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    elements = eg.trainable(model, ROWS)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=micro)
    optimizer = torch.optim.AdamW(elements.parameters(), lr=RATE, weight_decay=DECAY)
    loader = DataLoader(lessons(), batch_size=BATCH // WORLD // micro)
    wrapped, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    sizes, done = [], 0
    if isinstance(wrapped, DistributedDataParallel):
        wrapped.register_comm_hook(sizes, counted)
    if resume is not None:
        accelerator.load_state(resume)
        done = STEPS // 2
    while done < STEPS:
        rest = accelerator.skip_first_batches(loader, done * micro) if done * BATCH < 32 else loader
        for batch in rest:
            with accelerator.accumulate(wrapped):
                accelerator.backward(wrapped(**batch).loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(wrapped.parameters(), NORM)
                optimizer.step()
                optimizer.zero_grad()
            done += accelerator.sync_gradients
            if accelerator.sync_gradients and done == STEPS // 2:
                accelerator.save_state(folder / "half")
            if done == STEPS:
                break
    assert accelerator.unwrap_model(wrapped) is model
    assert set(accelerator.get_state_dict(wrapped)) == set(before)
    accelerator.wait_for_everyone()
    accelerator.free_memory()
    return result(folder, model, elements, before) | {"sizes": sizes}


def result(folder, model, elements, before):
    """Return the result: the rows, what else moved, and the patch, which every rank writes for itself here."""
    after = model.state_dict()
    values = after[TABLE][KNOWN:].clone()
    moved = {name: int((tensor != before[name]).sum()) for name, tensor in after.items()}
    for name in (TABLE, "lm_head.weight"):
        moved[name] -= int((after[name][KNOWN:] != before[name][KNOWN:]).sum())
    folder.mkdir(exist_ok=True)
    path = folder / f"rank{os.environ.get('RANK', '0')}.safetensors"
    elements.save(path)
    (leaf,) = elements.parameters()
    found = {"values": values, "leaf": leaf.detach().clone(), "moved": sum(moved.values()), "names": set(after)}
    found |= {"tied": torch.equal(after["lm_head.weight"], after[TABLE]), "patch": path.read_bytes()}
    elements.undo()
    return found | {"undone": all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())}


def refused():
    """Return the errors about elements of a model that was prepared before, and of modules inside of it."""
    wrapped = Accelerator(cpu=True).prepare(gpt2())
    said = []
    try:
        eg.trainable(wrapped, ROWS)
    except eg.FrameworkError as error:
        said.append(str(error))
    eg.trainable(wrapped.module, ROWS)
    (lesson, *_) = lessons()
    with torch.no_grad():
        wrapped(lesson["input_ids"][None])
    try:
        wrapped(lesson["input_ids"][None])
    except eg.FrameworkError as error:
        said.append(str(error))
    return said


def everything(folder):
    """All runs, by name."""
    found = {}
    for name, options in TRAINER.items():
        dtype = torch.float32 if "bf16" in options else torch.float64
        found[name] = with_trainer(folder / name, gpt2(dtype=dtype), **options)
    half = folder / "trainer" / f"checkpoint-{STEPS // 2}"
    found["resumed"] = with_trainer(folder / "resumed", gpt2(), resume=half)
    found["bfloat16"] = with_trainer(folder / "bfloat16", gpt2(dtype=torch.bfloat16))
    half = folder / "bfloat16" / f"checkpoint-{STEPS // 2}"
    patch = half / "rows.safetensors"
    found["bfloat16 resumed"] = with_trainer(folder / "more", gpt2(dtype=torch.bfloat16), patch, resume=half)
    found["accelerate"] = with_accelerate(folder / "accelerate", gpt2())
    found["accelerate accumulated"] = with_accelerate(folder / "accelerate2", gpt2(), micro=2)
    found["accelerate resumed"] = with_accelerate(folder / "again", gpt2(), resume=folder / "accelerate" / "half")
    return found


def written():
    """The table of a model that each rank drew for itself and wrote rows into, after a step that moves nothing."""
    rank = int(os.environ["RANK"])
    model = gpt2(seed=rank)
    elements = eg.trainable(model, ROWS)
    with torch.no_grad():
        model.transformer.wte.weight[KNOWN:] = 0.5 + rank
    wrapped, optimizer = Accelerator(cpu=True).prepare(model, torch.optim.SGD(elements.parameters(), lr=0.0))
    wrapped(**{name: tokens[None] for name, tokens in lessons()[0].items()}).loss.backward()
    optimizer.step()
    return model.state_dict()[TABLE].clone()


def example():
    """Return what the example prints on this rank, and whether a check of it failed."""
    path = Path(__file__).parents[2] / "examples" / "new_tokens_trainer.py"
    spec = util.spec_from_file_location(path.stem, path)
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with redirect_stdout(StringIO()) as printed:
        failed = module.main(["--language-steps", "100", "--word-steps", "30"])
    return failed, printed.getvalue()


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    report = {"runs": everything(folder), "refused": refused(), "written": written(), "example": example()}
    torch.save(report, folder / f"rank{os.environ['RANK']}.pt")
    dist.barrier()
    dist.destroy_process_group()
