"""Matrices of operations that are linear along each of the last axes: pools, resized images, repeated borders.

Such an operation multiplies each axis with a matrix of its own. The matrix is found by running the operation for one
axis on unit vectors, so that every option means what it means in PyTorch. Cones run parts of these products, and
sparsity patterns follow where the matrices are not zero.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from elementgrad._backends.torch import _compat

Tensor = torch.Tensor
Arguments = Mapping[str, Any]
LARGEST = 10**7
"""The most entries of a matrix; the elements of a longer axis are taken to depend on each other."""
Probe = Callable[[Tensor, Arguments, int, int, int], Tensor]
"""Runs an operation along one axis of vectors, by its arguments, the axis, the number of axes, and the new size."""


def axis_matrices(
    name: str,
    arguments: Arguments,
    before: Sequence[int],
    after: Sequence[int],
    dtype: torch.dtype = torch.float64,
) -> list[Tensor] | None:
    """Return the matrix, new size by old size, of each of the last axes of an operation.

    Args:
        name: the operation, without the ending of its gradient.
        arguments: its arguments by name, those of its gradient too.
        before: the sizes of the axes that it works on.
        after: their sizes in its result.
        dtype: the precision in which positions and weights are found.

    Returns:
        A matrix for each axis; None if there is no such operation, or if a matrix would be too large.
    """
    run = PROBES.get(name)
    if run is None or arguments.get("divisor_override") is not None:
        return None
    if any(old * new > LARGEST for old, new in zip(before, after, strict=True)):
        return None
    with torch.no_grad():
        return [
            run(torch.eye(old, dtype=dtype).unsqueeze(0), arguments, axis, len(after), new)[0].T.contiguous()
            for axis, (old, new) in enumerate(zip(before, after, strict=True))
        ]


def per_axis(values: Sequence[int], count: int) -> list[int]:
    """Return sizes for this many axes, of which one may stand for all."""
    return list(values) * count if len(values) == 1 else list(values)


def _average(x: Tensor, a: Arguments, axis: int, count: int, size: int) -> Tensor:
    kernel, padding = per_axis(a["kernel_size"], count), per_axis(a["padding"], count)
    stride = per_axis(a["stride"], count) if a["stride"] else kernel
    ends = a["ceil_mode"], a["count_include_pad"]
    return functional.avg_pool1d(x, kernel[axis], stride[axis], padding[axis], *ends)


def _adapt(x: Tensor, a: Arguments, axis: int, count: int, size: int) -> Tensor:
    return functional.adaptive_avg_pool1d(x, size)


def _resize(kernel: str, x: Tensor, a: Arguments, axis: int, count: int, size: int) -> Tensor:
    scales = a.get("scale_factors")
    if scales is None:
        scales = [
            a.get(name) for name in (("scales",) if count == 1 else ("scales_d", "scales_h", "scales_w")[-count:])
        ]
    corners = [a["align_corners"]] if "linear" in kernel or "cubic" in kernel else []
    # The kernels for one, two and three axes round differently, and a weight that is zero in one of them can be 1e-8 in
    # another. So the operation itself runs, with one pixel along all other axes.
    pixels = x.reshape(x.shape[:2] + tuple([x.shape[-1] if i == axis else 1 for i in range(count)]))
    sizes = [size if i == axis else 1 for i in range(count)]
    resized = _compat.upsample(
        kernel, pixels, sizes, [scales[i] if i == axis else None for i in range(count)], *corners
    )
    return resized.reshape(*x.shape[:2], size)


def _repeat_border(x: Tensor, a: Arguments, axis: int, count: int, size: int) -> Tensor:
    first = 2 * (count - 1 - axis)  # from the last axis to the first
    return functional.pad(x, tuple(a["padding"][first : first + 2]), mode="replicate")


def _names(*stems: str) -> list[str]:
    return [f"{stem}{count}d" for stem in stems for count in (1, 2, 3)]


RESIZES = (
    *_names("upsample_nearest", "_upsample_nearest_exact"),
    *("upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d"),
)
PROBES: dict[str, Probe] = {
    **dict.fromkeys(_names("avg_pool"), _average),
    **dict.fromkeys(("adaptive_avg_pool1d", "_adaptive_avg_pool2d", "_adaptive_avg_pool3d"), _adapt),
    **dict.fromkeys(("adaptive_max_pool2d", "adaptive_max_pool3d"), _adapt),
    **{name: partial(_resize, name) for name in RESIZES},
    **dict.fromkeys(_names("replication_pad"), _repeat_border),
}
"""The windows of `adaptive_max_pool`, which are those of the average; its result is one element of each."""
