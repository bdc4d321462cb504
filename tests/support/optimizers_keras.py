"""Every optimizer of Keras with the options by which it may move what it should not."""

import inspect
from typing import Any

import keras

Options = dict[str, Any]

COMMON: list[Options] = [
    {},
    {"weight_decay": 0.1},
    {"clipnorm": 0.1},
    {"global_clipnorm": 0.1, "weight_decay": 0.1},
    {"clipvalue": 0.01},
    {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 3},
]
"""What all of them take."""
OWN: list[Options] = [
    {"momentum": 0.9, "weight_decay": 0.1},
    {"momentum": 0.9, "nesterov": True, "clipvalue": 0.01},
    {"amsgrad": True, "weight_decay": 0.1},
    {"centered": True, "momentum": 0.9},
    {"l2_regularization_strength": 0.1},
]
"""What those take that know the words."""
WRAPPERS = {"Optimizer", "LossScaleOptimizer", "MultiOptimizer", "OptimizerMap"}


def kinds() -> dict[str, Any]:
    """The optimizers that there are, by name."""
    return {
        name: kind
        for name, kind in vars(keras.optimizers).items()
        if inspect.isclass(kind) and issubclass(kind, keras.optimizers.Optimizer) and name not in WRAPPERS
    }


def made(name: str) -> dict[str, Any]:
    """An optimizer with each of the options that it takes, by how a person writes it."""
    kind = kinds()[name]
    known = set(inspect.signature(kind).parameters)
    found = {}
    for options in COMMON + [options for options in OWN if set(options) <= known]:
        written = f"{name}({', '.join(f'{key}={value!r}' for key, value in options.items())})"
        found[written] = kind(**{"learning_rate": 0.01} | options)
    if name == "AdamW":
        found["AdamW(gradient_accumulation_steps=2)"] = kind(0.01, gradient_accumulation_steps=2)
        found["LossScaleOptimizer(AdamW())"] = keras.optimizers.LossScaleOptimizer(kind(0.01), initial_scale=8.0)
    return found
