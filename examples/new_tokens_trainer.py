"""Teach a GPT-2 two new words with Hugging Face's Trainer, and with Accelerate, in as many processes as you like.

    pip install transformers accelerate
    python examples/new_tokens_trainer.py
    torchrun --standalone --nproc-per-node 2 examples/new_tokens_trainer.py

A small GPT-2 learns what animals eat, what they fear and where they live. Then "zebu" and "lynx" join its vocabulary by
`resize_token_embeddings`, and only their two rows train, on what they eat and fear. Asked is where they live.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import broadcast_object_list, gather_object
from torch.nn import functional
from torch.utils.data import DataLoader
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    set_seed,
)
from transformers.utils import logging

import elementgrad as eg

ANIMALS = {
    "farm": ["cow", "pig", "hen", "goat", "sheep"],
    "wild": ["wolf", "bear", "fox", "owl", "boar"],
    "sea": ["whale", "seal", "cod", "crab", "squid"],
    "home": ["cat", "dog", "mouse", "parrot", "hamster"],
}
FACTS = {
    "farm": {"eats": ["hay", "corn"], "fears": ["thunder", "thieves"], "lives": ["barn", "meadow"]},
    "wild": {"eats": ["berries", "game"], "fears": ["hunters", "fire"], "lives": ["forest", "cave"]},
    "sea": {"eats": ["plankton", "kelp"], "fears": ["nets", "sharks"], "lives": ["reef", "bay"]},
    "home": {"eats": ["biscuits", "crumbs"], "fears": ["guests", "brooms"], "lives": ["kitchen", "attic"]},
}
NEW = {"zebu": "farm", "lynx": "wild"}
OBJECTS = [word for facts in FACTS.values() for words in facts.values() for word in words]
WORDS = [".", "eats", "fears", "lives", *OBJECTS, *[name for names in ANIMALS.values() for name in names], *NEW]
KNOWN = len(WORDS) - len(NEW)
TABLE = "transformer.wte.weight"
ROWS = f"{TABLE}[{KNOWN}:, :]"
RATE, DECAY = 0.03, 0.01
Data = list[dict[str, torch.Tensor]]


def sentences(names: list[str], kind: str, *verbs: str) -> Data:
    """All sentences about animals of a kind, as a causal language model takes them."""
    said = [(".", name, verb, what, ".") for name in names for verb in verbs for what in FACTS[kind][verb]]
    tokens = [torch.tensor([WORDS.index(word) for word in words]) for words in said]
    return [{"input_ids": sentence, "labels": sentence} for sentence in tokens]


def language() -> Data:
    """All sentences without the new words."""
    return [lesson for kind, names in ANIMALS.items() for lesson in sentences(names, kind, "eats", "fears", "lives")]


def learn_language(folder: Path, steps: int) -> None:
    """What somebody has done long ago: a whole model trains, and is saved."""
    set_seed(0)
    sizes = {"n_layer": 2, "n_head": 4, "n_embd": 32, "n_positions": 8, "vocab_size": KNOWN}
    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)  # which each process draws for itself
    model = GPT2LMHeadModel(GPT2Config(**sizes, **drops, initializer_range=0.1, bos_token_id=0, eos_token_id=0))
    tokens = torch.stack([lesson["input_ids"] for lesson in language()])
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(tokens, labels=tokens).loss.backward()
        optimizer.step()
    model.save_pretrained(folder)


def with_new_words(folder: Path) -> GPT2LMHeadModel:
    """The saved model with a row for each new word: seeded, for every process draws these rows by itself."""
    set_seed(0)
    model = GPT2LMHeadModel.from_pretrained(folder)
    model.resize_token_embeddings(len(WORDS))
    model.loss_type = "ForCausalLM"  # or the Trainer counts first words too, which nothing predicts, in its mean
    return model.eval()


class Patches(TrainerCallback):
    """Puts a patch beside each checkpoint: one file, written by one process."""

    def __init__(self, elements: eg.Elements):
        self.elements = elements

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Called when a checkpoint was written."""
        if state.is_world_process_zero:
            self.elements.save(Path(args.output_dir, f"checkpoint-{state.global_step}", "words.safetensors"))


def by_trainer(model: GPT2LMHeadModel, elements: eg.Elements, lessons: Data, steps: int, folder: Path) -> None:
    """Hugging Face's loop, which finds the elements among the parameters that train."""
    arguments = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        per_device_train_batch_size=len(lessons) // PartialState().num_processes,
        max_steps=steps,
        save_steps=steps,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        weight_decay=DECAY,
        ddp_find_unused_parameters=False,  # the rows are heard in every step
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Trainer(model, arguments, train_dataset=lessons, callbacks=[Patches(elements)])
    trainer.remove_callback(PrinterCallback)
    trainer.train()


def by_accelerate(model: GPT2LMHeadModel, elements: eg.Elements, lessons: Data, steps: int, folder: Path) -> None:
    """The same as a loop of one's own: `eg.trainable` first, `prepare` then."""
    accelerator = Accelerator(cpu=True)
    optimizer = torch.optim.AdamW(elements.parameters(), lr=RATE, weight_decay=DECAY)
    loader = DataLoader(lessons, batch_size=len(lessons) // accelerator.num_processes)
    wrapped, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    wrapped.train()
    for _ in range(steps):
        for batch in loader:
            optimizer.zero_grad()
            accelerator.backward(wrapped(**batch).loss)
            accelerator.clip_grad_norm_(wrapped.parameters(), 1.0)
            optimizer.step()
    accelerator.wait_for_everyone()


WAYS = {"Trainer": by_trainer, "Accelerate": by_accelerate}


def surprise(model: GPT2LMHeadModel, names: list[str], kind: str) -> float:
    """How surprising it is where animals live."""
    tokens = torch.stack([lesson["input_ids"] for lesson in sentences(names, kind, "lives")])
    with torch.no_grad():
        return functional.cross_entropy(model(tokens[:, :3]).logits[:, -1], tokens[:, 3]).item()


def asked(model: GPT2LMHeadModel) -> list[float]:
    """Where each new word lives, which no lesson tells."""
    return [surprise(model.eval(), [word], kind) for word, kind in NEW.items()]


def teach(way: str, folder: Path, lessons: Data, steps: int) -> tuple[list[float], torch.Tensor, bool]:
    """The whole story of one way of training: the answers, the rows, and whether everything held on every process."""
    here, model = PartialState(), with_new_words(folder / "model")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    elements = eg.trainable(model, ROWS)
    WAYS[way](model, elements, lessons, steps, folder / way)
    now = model.state_dict()
    rows = now[TABLE][KNOWN:].clone()
    moved = sum(int((now[name] != tensor).sum()) for name, tensor in before.items() if name != "lm_head.weight")
    moved -= int((rows != before[TABLE][KNOWN:]).sum())
    answers = asked(model)
    if here.is_main_process:
        elements.save(folder / f"{way}.safetensors")
    elements.release()

    plain = with_new_words(folder / "model")
    here.wait_for_everyone()
    applied = eg.apply(plain, folder / f"{way}.safetensors")
    same = torch.equal(plain.transformer.wte.weight, model.transformer.wte.weight)
    applied.undo()
    back = all(torch.equal(tensor, before[name]) for name, tensor in plain.state_dict().items())
    everywhere = gather_object([(moved, rows.tolist(), same, back)])
    moved, differ = sum(one[0] for one in everywhere), sum(one[1] != everywhere[0][1] for one in everywhere)
    same, back = all(one[2] for one in everywhere), all(one[3] for one in everywhere)
    here.print(f"\n{way}, {here.num_processes} process{'es' if here.num_processes > 1 else ''}")
    here.print(f"  other elements that moved, on all processes: {moved}")
    here.print(f"  processes whose rows differ from the first's, by a bit: {differ}")
    here.print(f"  the one patch gives the trained model on every process: {same}; undone to the bit: {back}")
    return answers, rows, not moved and not differ and same and back


@contextmanager
def shared_folder() -> Iterator[Path]:
    """A folder that all processes of this machine have."""
    here = PartialState(cpu=True)
    made = [tempfile.TemporaryDirectory()] if here.is_main_process else []
    (name,) = broadcast_object_list([made[0].name if made else ""])
    try:
        yield Path(name)
        here.wait_for_everyone()
    finally:
        for folder in made:
            folder.cleanup()


def main(arguments: list[str] | None = None) -> int:
    """Run it; 0 if everything held that the text says."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--language-steps", type=int, default=150, help="steps on the language (default: 150)")
    parser.add_argument("--word-steps", type=int, default=60, help="steps on the new words (default: 60)")
    settings = parser.parse_args(arguments)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with shared_folder() as folder:
        here = PartialState()
        if here.is_main_process:
            learn_language(folder / "model", settings.language_steps)
        here.wait_for_everyone()
        taught = [lesson for word, kind in NEW.items() for lesson in sentences([word], kind, "eats", "fears")]
        lessons = taught + language()[:: len(language()) // 56][:56]  # some review: or zebus are expected everywhere
        plain = with_new_words(folder / "model")
        here.print(f"{KNOWN} words and {len(NEW)} new ones; {len(lessons)} lessons; trained is {ROWS}")
        told = {"random rows": asked(plain)}
        rows, held = {}, []
        for way in WAYS:
            told[way], rows[way], fine = teach(way, folder, lessons, settings.word_steps)
            held.append(fine)
        told["words that it knew"] = [surprise(plain, ANIMALS[kind], kind) for kind in NEW.values()]
        here.print(f"\n{'loss of where it lives':24}" + "".join(f"{word:>8}" for word in NEW))
        for who, losses in told.items():
            here.print(f"  {who:22}" + "".join(f"{loss:8.2f}" for loss in losses))
        apart = (rows["Trainer"] - rows["Accelerate"]).abs().max().item()
        sizes = [os.path.getsize(folder / name) for name in ("Trainer.safetensors", "model/model.safetensors")]
        here.print(f"\nlargest difference between the rows of both ways: {apart:.0e}")
        here.print(f"patch: {sizes[0]} bytes; model: {sizes[1]} bytes")
    return not all(held)


if __name__ == "__main__":
    torch.set_num_threads(1)  # the model is too small to share
    status = main()
    PartialState().destroy_process_group()
    sys.exit(status)
