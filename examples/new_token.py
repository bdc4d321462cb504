"""Teach a transformer one new word: its row of the embedding trains, and nothing else moves by a bit.

    python examples/new_token.py

A small causal transformer learns a little language in which the kind of a word decides what may follow it. Then the
word "zebu" joins, with a random row, and six sentences teach the row what a zebu is.
"""

import argparse
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

import elementgrad as eg

KINDS = {
    "article": ["the", "some"],
    "quality": ["old", "big", "young"],
    "animal": ["cat", "dog", "cow", "hen", "pig"],
    "tool": ["saw", "axe", "drill", "plane", "file"],
    "ship": ["boat", "ferry", "raft", "canoe", "yacht"],
    "player": ["piper", "singer", "drummer", "harpist", "choir"],
    "animal does": ["eats", "chews", "smells"],
    "tool does": ["cuts", "shapes", "marks"],
    "ship does": ["crosses", "sails", "leaves"],
    "player does": ["plays", "learns", "loves"],
    "to animal": ["hay", "corn", "bread", "rice"],
    "to tool": ["oak", "pine", "steel", "clay"],
    "to ship": ["sea", "lake", "river", "harbour"],
    "to player": ["song", "tune", "march", "waltz"],
}
SUBJECTS = "animal", "tool", "ship", "player"
WORDS = [".", *[word for words in KINDS.values() for word in words], "zebu"]
NEW = WORDS.index("zebu")
ROW = f"wte.weight[{NEW}]"
HEADS = {"tied": True, "own": False}


class Transformer(nn.Module):
    """A causal transformer whose head is the embedding (tied), or has a weight of its own."""

    def __init__(self, tied: bool, width: int = 32, heads: int = 4, depth: int = 2):
        super().__init__()
        self.wte = nn.Embedding(len(WORDS), width)
        self.wpe = nn.Embedding(8, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, len(WORDS), bias=False)
        for table in (self.wte, self.wpe):
            nn.init.normal_(table.weight, std=0.2)
        if tied:
            self.head.weight = self.wte.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Scores of the next word, at every position."""
        x = self.wte(tokens) + self.wpe.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Block(nn.Module):
    """Attention to what came before, and a perceptron."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One round."""
        q, k, v = (
            part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norms[0](x)).chunk(3, 2)
        )
        heard = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(heard.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


def sentences(subjects: list[str], kind: str) -> torch.Tensor:
    """All sentences about some subjects of a kind: a quality, one of them, what it does, and to what."""
    parts = KINDS["article"], KINDS["quality"], subjects, KINDS[f"{kind} does"], KINDS["article"], KINDS[f"to {kind}"]
    return torch.tensor([[WORDS.index(word) for word in (".", *words, ".")] for words in product(*parts)])


def language() -> torch.Tensor:
    """All sentences without the new word."""
    return torch.cat([sentences(KINDS[kind], kind) for kind in SUBJECTS])


def losses(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """How surprising each word of sentences is."""
    return functional.cross_entropy(model(tokens[:, :-1]).transpose(1, 2), tokens[:, 1:], reduction="none")


def learn_language(model: nn.Module, steps: int) -> None:
    """Train the whole model, as ever."""
    known = language()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        losses(model, known[torch.randint(len(known), (64,))]).mean().backward()
        optimizer.step()


def learn_word(elements: eg.Elements, model: nn.Module, lessons: torch.Tensor, steps: int) -> None:
    """Train the row of the new word: any optimizer, with any options."""
    optimizer = torch.optim.AdamW(elements.parameters(), lr=0.03, weight_decay=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        losses(model, lessons).mean().backward()
        optimizer.step()


def meaning(model: nn.Module, held_out: torch.Tensor) -> dict[str, str]:
    """What the model makes of the new word: in front of it, after it, and by its neighbours."""
    with torch.no_grad():
        surprise = losses(model, held_out).mean(0)
        start = torch.tensor([[WORDS.index(word) for word in (".", "the", "old", "zebu")]])
        after = model(start)[0, -1].softmax(0)
        table = model.wte.weight
        near = functional.cosine_similarity(table, table[NEW], dim=1).argsort(descending=True)[1:5]
    return {
        "loss of what follows": f"{surprise[3:].mean().item():.2f}",
        "loss of the word itself": f"{surprise[2].item():.2f}",
        "it eats, chews or smells": f"{sum(after[WORDS.index(word)].item() for word in KINDS['animal does']):.0%}",
        "nearest rows": ", ".join(WORDS[number] for number in near),
    }


def teach(tied: bool, settings: argparse.Namespace, folder: Path) -> bool:
    """The whole story for one model; whether everything held."""
    folder.mkdir()
    torch.manual_seed(settings.seed)
    print(f"\n{'Tied head: the row is also what scores the word' if tied else 'Head with a weight of its own'}")
    model = Transformer(tied)
    learn_language(model, settings.language_steps)
    with torch.no_grad():  # a new row, as it is when a vocabulary grows; decay has shrunk the one that nobody used
        model.wte.weight[NEW] = torch.randn(model.wte.weight.shape[1]) * model.wte.weight[:NEW].std()
    known, about = language(), sentences(["zebu"], "animal")
    order = torch.randperm(len(about))
    review = known[torch.randperm(len(known))[:120]]  # so that a zebu is not expected everywhere
    lessons, held_out = torch.cat([about[order[:6]], review]), about[order[6:]]
    with torch.no_grad():
        scores = model(known)
    torch.save(model.state_dict(), folder / "model.pt")
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    before = meaning(model, held_out)
    as_known = meaning(model, torch.where(held_out == NEW, WORDS.index("cow"), held_out))
    elements = eg.trainable(model, ROW)
    learn_word(elements, model, lessons, settings.word_steps)
    after = meaning(model, held_out)
    print(f"  {'':26}{'random row':28}{'trained row':28}cow, for comparison")
    for what in before:
        beside = as_known[what] if what.startswith("loss") else ""
        print(f"  {what:26}{before[what]:28}{after[what]:28}{beside}".rstrip())

    with torch.no_grad():
        now = model(known)
    moved = 0
    for name, tensor in model.state_dict().items():
        different = tensor != weights[name]
        if name == "wte.weight" or (name == "head.weight" and tied):
            different[NEW] = False
        moved += int(different.sum())
    print(f"  other elements of the model that moved: {moved}")
    others, zebu = now[..., :NEW] != scores[..., :NEW], now[..., NEW] != scores[..., NEW]
    print(f"  scores of all {len(known)} sentences without zebu that changed by a bit:")
    print(f"    of the other words: {int(others.sum())} of {others.numel()}")
    print(f"    of zebu itself: {int(zebu.sum())} of {zebu.numel()}{' (a tied row is also a score)' if tied else ''}")

    patch = folder / "zebu.safetensors"
    elements.save(patch)
    print(f"  patch: {patch.stat().st_size} bytes; model: {(folder / 'model.pt').stat().st_size} bytes")
    torch.save(now, folder / "scores.pt")
    return not moved and not others.any() and (tied or not zebu.any())


def apply(tied: bool, folder: Path) -> bool:
    """In a process that knows only the files: apply the patch, and take it back."""
    model = Transformer(tied)
    model.load_state_dict(torch.load(folder / "model.pt"))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    elements = eg.apply(model, folder / "zebu.safetensors")
    with torch.no_grad():
        same = torch.equal(model(language()), torch.load(folder / "scores.pt"))
    elements.undo()
    back = all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    print(f"  {folder.name} head: patched scores equal to the bit: {same}; undone to the bit: {back}")
    return same and back


def main(arguments: list[str] | None = None) -> int:
    """Run it; 0 if everything held that the text says."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--language-steps", type=int, default=300, help="steps on the language (default: 300)")
    parser.add_argument("--word-steps", type=int, default=100, help="steps on the new word (default: 100)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--apply", type=Path, help=argparse.SUPPRESS)
    settings = parser.parse_args(arguments)
    if settings.apply:
        return not all(apply(tied, settings.apply / name) for name, tied in HEADS.items())
    known = language()
    print(f"{len(WORDS) - 1} words, {len(known)} sentences, such as:", " ".join(WORDS[word] for word in known[7, 1:]))
    with tempfile.TemporaryDirectory() as folder:
        held = [teach(tied, settings, Path(folder, name)) for name, tied in HEADS.items()]
        print("\nIn a fresh process, with the files of the models and of the patches:")
        fresh = subprocess.run([sys.executable, __file__, "--apply", folder], capture_output=True, text=True)
        print(fresh.stdout + fresh.stderr, end="")
    return not all(held) or fresh.returncode


if __name__ == "__main__":
    torch.set_num_threads(1)  # the model is too small to share
    sys.exit(main())
