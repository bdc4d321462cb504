"""Hooks of PyTorch: ours on every optimizer and module, which come and go with elements that train."""

import subprocess
import sys

CODE = """
import copy, gc, importlib, pkgutil
import torch
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers
import elementgrad._backends.torch as ours
import elementgrad as eg

def hooks():
    return sum(len(held) for home in (modules, optimizers) for name, held in vars(home).items()
               if name.startswith("_global_") and name.endswith("_hooks"))

for found in pkgutil.walk_packages(ours.__path__, ours.__name__ + "."):
    importlib.import_module(found.name)
print("imported", hooks())

def trained(model, elements):
    before = model.weight.detach().clone()
    model(torch.ones(1, 3)).sum().backward()
    torch.optim.SGD(elements.parameters(), lr=0.5).step()
    return (model.weight != before).nonzero().tolist()

model = torch.nn.Linear(3, 2)
one, two = eg.trainable(model, "weight[0, 1]"), eg.trainable(model, "bias[0]")
print("training", hooks() > 0, trained(model, one))
one.release()
print("one of two released", hooks() > 0)
two.release()
print("released", hooks())
_, other = both = copy.deepcopy((model, eg.trainable(model, "weight[1, 1]")))
model = one = two = None
gc.collect()
print("a copy", hooks() > 0, trained(*both))
other.release()
print("its copy released", hooks())
elements = eg.trainable(torch.nn.Linear(3, 2), "weight[0, 0]")
elements = None
gc.collect()
print("collected", hooks())
one = eg.trainable(torch.nn.Linear(3, 2), "weight[0, 0]")

def collect(*_):
    global one
    one = None
    gc.collect()

early = optimizers.register_optimizer_step_pre_hook(collect)
torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=1.0).step()
early.remove()
eg.trainable(torch.nn.Linear(3, 2), "weight[0, 0]").release()
print("collected in a step", hooks())
"""


def test_hooks_on_every_optimizer_and_module_are_there_while_elements_train_and_at_no_other_time():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "imported 0",
        "training True [[0, 1]]",
        "one of two released True",
        "released 0",
        "a copy True [[1, 1]]",
        "its copy released 0",
        "collected 0",
        "collected in a step 0",
    ]
