"""What patches cost: comparing checkpoints, a million scattered elements, and a patch beside a merged LoRA."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import elementgrad as eg
from benchmarks.harness import Row
from elementgrad._train.gaps import decode_gaps, encode_gaps
from elementgrad._train.weights import FileTensor, Weights

SIDE, LAYERS = 4096, 10
TENSOR_MB = SIDE * SIDE * 4 / 2**20
DIFF_BOUND = 4.0
"""Comparing two files takes at most four times as long as `numpy.not_equal` over the same bytes."""
SCATTERED, SECOND = 1_000_000, 1_000_000.0
POSITIONS = 100_000_000
ELEMENTS = 10_000_000
BYTES = {True: 5.2, False: 3.2}
"""The most bytes of a file for each scattered bfloat16 element, with and without the originals."""
MERGE_BOUND = 1 / 5


def changed(array: np.ndarray, seed: int, share: float = 0.01) -> np.ndarray:
    """A copy in which a share of the elements is another."""
    generator, other = np.random.default_rng(seed), array.copy()
    positions = generator.choice(array.size, int(array.size * share), replace=False)
    other.reshape(-1)[positions] += 1
    return other


def diff_rows() -> Iterator[Row]:
    folder = Path(tempfile.mkdtemp())
    generator = np.random.default_rng(0)
    before = {f"layer{i}": generator.random((SIDE, SIDE), np.float32) for i in range(3)}
    after = {name: changed(array, seed) for seed, (name, array) in enumerate(before.items())}
    for name, tensors in (("before", before), ("after", after)):
        Weights({key: FileTensor.of(array) for key, array in tensors.items()}).write(folder / f"{name}.safetensors")

    def ours() -> Any:
        return eg.diff(folder / "before.safetensors", folder / "after.safetensors")

    def plain() -> Any:
        return [np.not_equal(before[name], after[name]) for name in before]

    name = f"diff of two files with 1 % of three {SIDE} x {SIDE} tensors changed"
    yield Row(name, ours, plain, "numpy.not_equal in memory", DIFF_BOUND, most_mb=2 * TENSOR_MB, repeats=5)


def size_rows() -> Iterator[Row]:
    """The size of a file stands in the column of memory: bytes of an element, times a million, are megabytes."""
    folder = Path(tempfile.mkdtemp())
    generator = np.random.default_rng(0)
    bits = generator.integers(0, 2**16, 100 * ELEMENTS, np.uint16).view(np.uint8).reshape(-1, 2)
    other = bits.copy()
    other[generator.choice(len(bits), ELEMENTS, replace=False), 0] ^= 1
    before, after = (Weights({"w": FileTensor("bfloat16", (len(each),), each)}) for each in (bits, other))
    before.write(folder / "before.safetensors")
    after.write(folder / "after.safetensors")
    del bits, other, before, after
    for originals, most in BYTES.items():
        path = folder / f"patch-{originals}.safetensors"
        eg.diff(folder / "before.safetensors", folder / "after.safetensors", path, originals=originals)
        size = path.stat().st_size / ELEMENTS
        name = f"bytes of a scattered bfloat16 element {'with' if originals else 'without'} originals, as MB"

        def written(_: Any, size: float = size) -> float:
            return size

        yield Row(name, lambda: None, lambda: None, "nothing", most_mb=most, memory=written, repeats=1)


def position_rows() -> Iterator[Row]:
    positions = np.cumsum(np.random.default_rng(0).integers(1, 200, POSITIONS, np.int16), dtype=np.int64)
    size = int(positions[-1]) + 1
    limit = 2 * positions.nbytes / 2**20

    def ours() -> Any:
        return np.array_equal(decode_gaps(encode_gaps(positions), POSITIONS, size), positions)

    assert ours()
    name = f"{POSITIONS} scattered positions, written, read and checked"
    yield Row(name, ours, lambda: np.cumsum(np.diff(positions)), "numpy diff and cumsum", most_mb=limit, repeats=1)


def torch_rows() -> Iterator[Row]:
    yield from scattered_rows()
    yield from merge_rows()


def scattered_rows() -> Iterator[Row]:
    import torch

    folder = Path(tempfile.mkdtemp())
    model = torch.nn.Linear(SIDE, SIDE, bias=False)
    positions = np.sort(np.random.default_rng(0).choice(SIDE * SIDE, SCATTERED, replace=False))
    place = eg.at("weight")[tuple(np.unravel_index(positions, (SIDE, SIDE)))]

    def ours() -> None:
        elements = eg.trainable(model, place)
        with torch.no_grad():
            next(iter(elements.parameters())).add_(1.0)
        elements.save(folder / "patch.safetensors")
        elements.release(keep=False)
        eg.apply(model, folder / "patch.safetensors").undo()

    name = f"torch {SCATTERED} scattered elements: trainable, save, release, apply, undo"
    yield Row(name, ours, lambda: None, "nothing", most_over=SECOND, repeats=5)


def merge_rows() -> Iterator[Row]:
    import torch
    from peft import LoraConfig, get_peft_model

    def make() -> Any:
        torch.manual_seed(0)
        return torch.nn.Sequential(*[torch.nn.Linear(SIDE, SIDE, bias=False) for _ in range(LAYERS)])

    model = make()
    state = {
        name: torch.from_numpy(changed(tensor.numpy(), seed))
        for seed, (name, tensor) in enumerate(model.state_dict().items())
    }
    patch = eg.diff(model, state)
    del state
    names = [str(number) for number in range(LAYERS)]
    peft = get_peft_model(make(), LoraConfig(r=8, target_modules=names, init_lora_weights=False))

    def apply() -> None:
        eg.apply(model, patch).undo()

    def merge() -> None:
        peft.merge_adapter()
        peft.unmerge_adapter()

    # Both ways are taken back, so that a repeat finds what the first call found.
    name = f"torch a patch of 1 % of {LAYERS} layers of {SIDE} x {SIDE}, applied and undone"
    yield Row(name, apply, merge, "PEFT merges and unmerges a LoRA", MERGE_BOUND, repeats=5)


SUITES = {
    "patches-files": diff_rows,
    "patches-sizes": size_rows,
    "patches-positions": position_rows,
    "patches-torch": torch_rows,
}
