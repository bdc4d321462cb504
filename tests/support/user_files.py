"""A user's own file for the command line: on every framework the same names and the same numbers."""

TORCH = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(3, 2)
        with torch.no_grad():
            self.fc.weight.copy_(torch.arange(6.0).reshape(3, 2).T)
            self.fc.bias.fill_(1.0)

    def forward(self, x):
        return self.fc(x)

def loss(x, scale=2.0):
    print("a line of the user's")
    return scale * (x**2).sum()

def cut(x):
    return x.detach().sum()

def root(x):
    return torch.sqrt(x).sum()

def straight(x):
    return x + (x.round() - x).detach()

def patched():
    from safetensors.torch import load_file
    net = Net()
    net.load_state_dict(load_file("patched.safetensors"))
    return net

array = torch.tensor([1.0, 2.0, 3.0])
"""
TENSORFLOW = """
import keras
import tensorflow as tf

def Net():
    net = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, name="fc")])
    net.set_weights([tf.reshape(tf.range(6.0), (3, 2)), tf.ones(2)])
    return net

def loss(x, scale=2.0):
    print("a line of the user's")
    return scale * tf.reduce_sum(x**2)

def cut(x):
    return tf.reduce_sum(tf.stop_gradient(x))

def root(x):
    return tf.reduce_sum(tf.sqrt(x))

def straight(x):
    return x + tf.stop_gradient(tf.round(x) - x)

def patched():
    net = Net()
    net.load_weights("patched.weights.h5")
    return net

array = tf.constant([1.0, 2.0, 3.0])
"""
JAX = """
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

@dataclass
class Model:
    kernel: jax.Array
    bias: jax.Array

    def __call__(self, x):
        return x @ self.kernel + self.bias

jax.tree_util.register_dataclass(Model, ["kernel", "bias"], [])

def Net():
    return Model(jnp.array(np.arange(6.0, dtype="float32").reshape(3, 2)), jnp.ones(2, "float32"))

def loss(x, scale=2.0):
    print("a line of the user's")
    return scale * jnp.sum(x**2)

def cut(x):
    return jnp.sum(jax.lax.stop_gradient(x))

def root(x):
    return jnp.sum(jnp.sqrt(x))

def straight(x):
    return x + jax.lax.stop_gradient(jnp.round(x) - x)

def patched():
    return Model(**{name: jnp.array(array) for name, array in np.load("patched.npz").items()})

array = jnp.array([1.0, 2.0, 3.0], "float32")
"""
COMMON = """
def bad(x):
    return helper(x)

def helper(x):
    raise RuntimeError("mine")

def first(x, ids):
    return x + 0.0

def defaulted(width=3):
    return Net()
"""
FILES = {
    "torch": "import numpy as np\n" + TORCH + COMMON,
    "tensorflow": "import numpy as np\n" + TENSORFLOW + COMMON,
    "jax": "import numpy as np\n" + JAX + COMMON,
}
WEIGHT = {"torch": "fc.weight[1, 2]", "tensorflow": "fc/kernel[2, 1]", "jax": "kernel[2, 1]"}
"""The weight from input 2 to output 1, which is 5."""
OUT = {"torch": "patched.safetensors", "tensorflow": "patched.weights.h5", "jax": "patched.npz"}
"""Where each keeps its weights."""
