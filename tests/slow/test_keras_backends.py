"""Keras models that compute with another backend than TensorFlow are refused by every verb, in the same words."""

import json
import os
import subprocess
import sys

import pytest

CODE = """
import json, sys
import keras, numpy as np, elementgrad as eg

model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, name="fc")])
x = keras.ops.convert_to_tensor(np.ones((1, 3), np.float32))
asked = {"of": "output[0, 0]"}
verbs = {
    "names": lambda: eg.names(model, x),
    "grad": lambda: eg.grad(model, x, **asked),
    "grad of a method": lambda: eg.grad(model.call, x, **asked),
    "jacobian": lambda: eg.jacobian(model, x),
    "hessian": lambda: eg.hessian(model, x, **asked),
    "contributions": lambda: eg.contributions(model, x, **asked),
    "explain": lambda: eg.explain(model, x, **asked),
    "check": lambda: eg.check(model, x, **asked),
    "report": lambda: eg.report("report.html", model, x, **asked),
    "top": lambda: eg.top(model, lambda model: model(x)[0, 0], 1),
    "names_from": lambda: eg.grad(lambda x: model(x), x, wrt="fc/kernel[0, 0]", names_from=model, **asked),
    "an argument": lambda: eg.grad(lambda m, x: m(x), model, x, wrt="m/fc/kernel[0, 0]", **asked),
    "trainable": lambda: eg.trainable(model, "fc/kernel[0, 0]"),
    "apply": lambda: eg.apply(model, "patch.safetensors"),
}
said = {}
for verb, ask in verbs.items():
    try:
        said[verb] = f"no error but {ask()}"
    except Exception as error:
        said[verb] = f"{type(error).__name__}: {error}"
if sys.argv[1] == "torch":
    import torch

    class Outer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model.get_layer("fc")

        def forward(self, x):
            return self.inner(x)

    outer = Outer()
    (inside,) = [name for name, _ in outer.named_parameters() if name.endswith("kernel")]
    for verb, ask in {
        "trainable inside": lambda: eg.trainable(outer, eg.at(inside)[0, 0]),
        "grad inside": lambda: eg.grad(outer, x, wrt=eg.at(inside)[0, 0], **asked),
    }.items():
        try:
            said[verb] = f"no error but {ask()}"
        except Exception as error:
            said[verb] = f"{type(error).__name__}: {error}".replace("Dense", "Sequential")
for verb, ask in {
    "model argument": lambda: eg.grad(lambda model: model(x)[0, 0], model, wrt="model.fc/kernel[0, 0]"),
    "names_from": lambda: eg.grad(lambda x: model(x)[0, 0], x, wrt="fc/kernel[0, 0]", names_from=model),
    "bare variable": lambda: eg.grad(lambda x: model(x)[0, 0], x, wrt=model.get_layer("fc").kernel),
    "variable": lambda: eg.grad(lambda x: model(x)[0, 0], x, wrt=eg.at(model.get_layer("fc").kernel)[0, 0]),
}.items():
    try:
        said[verb] = f"no error but {ask()}"
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        said[verb] = text.replace("Variable is a Keras variable", "Sequential is a Keras model")
by_inputs = np.asarray(keras.ops.convert_to_numpy(eg.grad(lambda x: model(x), x, of="output[0, 0]", wrt="x")))
kernel = keras.ops.convert_to_numpy(model.get_layer("fc").kernel)
print(json.dumps([said, np.array_equal(by_inputs[0], kernel[:, 0])]), file=sys.stderr)
"""


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_every_verb_refuses_a_keras_model_on_another_backend(tmp_path, backend):

    environment = os.environ | {"KERAS_BACKEND": backend, "KERAS_HOME": str(tmp_path), "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [sys.executable, "-c", CODE, backend]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    said, by_inputs = json.loads(done.stderr.splitlines()[-1])
    expected = f"FrameworkError: Sequential is a Keras model on the {backend} backend, and only Keras on TensorFlow is "
    assert {verb: text for verb, text in said.items() if not text.startswith(expected)} == {}
    assert len(set(said.values())) == 1
    assert by_inputs  # what the sentence advises works
