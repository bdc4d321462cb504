"""The tour on PyTorch, in cells.

The runner executes `setup`, `net` and `reader` first. Other cells start
with the names that these have left, and `folder`, a temporary directory.
The tour shows the comment at the head of a cell, its code, and the values
of its last line.
"""

# %% setup
import time

import torch

import elementgrad as eg
from elementgrad._tour.data import load_digits, make_photo, make_sentences

images, labels = load_digits()
sentences = make_sentences()

# %% net
# Two convolutions and a head, trained on the first 1500 digits.
torch.manual_seed(0)
net = torch.nn.Sequential()
net.add_module("conv1", torch.nn.Conv2d(1, 6, 3))
net.add_module("tanh1", torch.nn.Tanh())
net.add_module("conv2", torch.nn.Conv2d(6, 16, 3))
net.add_module("tanh2", torch.nn.Tanh())
net.add_module("flat", torch.nn.Flatten())
net.add_module("head", torch.nn.Linear(256, 10))

x, y = torch.tensor(images)[:, None], torch.tensor(labels).long()
optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
for _ in range(6):
    for batch in torch.randperm(1500).split(100):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(
            net(x[batch]), y[batch]
        ).backward()
        optimizer.step()
net.zero_grad()
right = (net(x[1500:]).argmax(1) == y[1500:]).float().mean()
image = x[1504:1505]  # a three that it has never seen
right

# %% reader
# An embedding of 50 x 32, a GRU of 64 and a head, trained on sentences.
torch.manual_seed(0)


class Reader(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(50, 32)
        self.gru = torch.nn.GRU(32, 64, batch_first=True)
        self.head = torch.nn.Linear(64, 50)

    def forward(self, tokens):
        return self.head(self.gru(self.embedding(tokens))[0])


reader, tokens = Reader(), torch.tensor(sentences).long()
optimizer = torch.optim.AdamW(reader.parameters(), lr=0.01)
for _ in range(5):
    for batch in torch.randperm(512).split(32):
        optimizer.zero_grad()
        scores = reader(tokens[batch, :-1]).flatten(0, 1)
        ahead = tokens[batch, 1:].flatten()
        torch.nn.functional.cross_entropy(scores, ahead).backward()
        optimizer.step()
reader.zero_grad()


def losses(*tokens):
    """The loss of every word that may come next."""
    return -reader(torch.tensor([tokens]))[0, -1].log_softmax(0)


likely = losses(0, 43, 2, 18, 1).neg().exp()[2:6].sum()
likely

# %% replaced: usual
# Assign to it.
v = torch.tensor([1.0, 2.0, 3.0, 4.0], requires_grad=True)
v[2] = 10.0
v

# %% replaced
# `set` gives a new tensor. The gradient of the old element is 0, and the
# value has its own.
v = torch.tensor([1.0, 2.0, 3.0, 4.0], requires_grad=True)
ten, seven = torch.tensor([10.0, 7.0], requires_grad=True)

new = eg.at(v)[2].set(ten)
of_sum = torch.autograd.grad(new.sum(), [v, ten])

loss = (eg.at(v)[0].set(seven) ** 2).sum()
of_loss = torch.autograd.grad(loss, [v, seven])
new, of_sum, loss, of_loss

# %% alone: usual
# Multiply by a mask. A NaN somewhere else comes through all the same.
v = torch.tensor([1.0, 2.0, 3.0, float("nan")], requires_grad=True)
mask = torch.tensor([0.0, 0.0, 1.0, 0.0])
((v * mask) ** 2).sum().backward()
v.grad

# %% alone
# `only` has all values of v, and the gradient of the element you name.
v = torch.tensor([1.0, 2.0, 3.0, 4.0], requires_grad=True)
(eg.at(v)[2].only() ** 2).sum().backward()
v.grad

# %% stepped: usual
# Replace the element first. Then its own gradient is 0, and every other
# element moves: the wrong way round.
v = torch.tensor([1.0, 2.0, 3.0, 4.0], requires_grad=True)
replaced = v.index_put((torch.tensor(1),), torch.tensor(2.0))
(replaced**2).sum().backward()
v - 0.1 * v.grad

# %% stepped
# Keep the vector as it is and let the gradient reach element 1 alone.
v = torch.tensor([1.0, 2.0, 3.0, 4.0], requires_grad=True)
(eg.at(v)[1].only() ** 2).sum().backward()
v - 0.1 * v.grad

# %% itself: usual
# Call backward on an element of a tensor that does not require a gradient.
X = torch.arange(1.0, 10.0).reshape(3, 3)
X[1, 2].backward()
X.grad

# %% itself
# Name the element. A plain tensor will do.
X = torch.arange(1.0, 10.0).reshape(3, 3)
one = eg.grad(lambda X: X, X, of="output[1, 2]")
total = eg.grad(lambda X: X.sum(), X)
one, total

# %% product: usual
# Compute the whole Jacobian and throw most of it away: 16 numbers for these
# two, and 10^12 for matrices of 1000 x 1000.
X = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
Y = torch.tensor([[5.0, 6.0], [7.0, 8.0]])
whole = torch.func.jacrev(torch.matmul)(X, Y)
whole.numel(), whole[0, 0]

# %% product
# A Jacobian that you index, and nothing else is computed.
X = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
Y = torch.tensor([[5.0, 6.0], [7.0, 8.0]])
J = eg.jacobian(torch.matmul, X, Y, wrt=X)
J[(0, 0), :], J[(0, 0), (0, 1)]

# %% pixel: usual
# Catch the feature map in a hook and call backward. The number is right,
# and now every parameter before it has a gradient that the next training
# step will add to its own.
seen = {}
hook = net.conv2.register_forward_hook(
    lambda module, args, result: seen.update(conv2=result)
)
x = image.clone().requires_grad_()
net(x)
seen["conv2"][0, 5, 1, 2].backward()
left_behind = [
    name for name, p in net.named_parameters() if p.grad is not None
]
hook.remove()
net.zero_grad()
x.grad[0, 0, 3, 4], left_behind

# %% pixel
# Name both. No hook, and no gradient is left anywhere. The whole receptive
# field costs the same one sweep.
field = eg.grad(net, image, of="conv2[0, 5, 1, 2]", wrt="input[0, 0]")
number = eg.grad(
    net, image, of="conv2[0, 5, 1, 2]", wrt="input[0, 0, 3, 4]"
)
untouched = all(p.grad is None for p in net.parameters())
number, field, untouched

# %% photo: usual
# Run the whole picture, 512 x 512 x 3, through all layers and back again
# for one element, which sees 13 x 13 pixels.
torch.manual_seed(0)
tower = torch.nn.Sequential()
for layer in range(6):
    tower.append(torch.nn.Conv2d(16 if layer else 3, 16, 3, padding=1))
    tower.append(torch.nn.Tanh())
photo = torch.tensor(make_photo()).movedim(-1, 0)[None]

pixels = photo.clone().requires_grad_()
start = time.perf_counter()
output = tower(pixels)
(gradient,) = torch.autograd.grad(output[0, 5, 200, 300], pixels)
milliseconds = 1000 * (time.perf_counter() - start)
milliseconds, output[0, 5, 200, 300], gradient[0, :, 200, 300]

# %% photo
# `eg.grad` runs what the element depends on, its cone. `eg.field` says
# which pixels these are, and `eg.value` evaluates the element alone.
torch.manual_seed(0)
tower = torch.nn.Sequential()
for layer in range(6):
    tower.append(torch.nn.Conv2d(16 if layer else 3, 16, 3, padding=1))
    tower.append(torch.nn.Tanh())
photo = torch.tensor(make_photo()).movedim(-1, 0)[None]

element = "output[0, 5, 200, 300]"
field = eg.field(tower, photo, of=element, wrt="input")
value = eg.value(tower, photo, of=element)
start = time.perf_counter()
gradient = eg.grad(tower, photo, of=element)
milliseconds = 1000 * (time.perf_counter() - start)
milliseconds, value, gradient[0, :, 200, 300], field

# %% score
# Any tensor of the model has a name, and so has each of its elements.
places = {
    "pixels": "input[0, 0]",
    "maps": "tanh1",
    "weight": "conv1.weight[4, 0, 1, 1]",
}
slopes = eg.grad(net, image, of="output[0, 3]", wrt=places)
slopes["pixels"], slopes["maps"].shape, slopes["weight"]

# %% words
# The embedding of each word is an activation like any other.
sentence = ["a", "brave", "cat", "sees", "the"]
tokens = torch.tensor([[1, 43, 2, 18, 0]])
of_words = eg.grad(reader, tokens, of="output[0, -1, 2]", wrt="embedding")
sizes = of_words.norm(dim=-1)
sizes

# %% large
# A plan says what a read would cost, before anything is paid.
J = eg.jacobian(net, image, of="conv2", wrt="input")
big = eg.jacobian(lambda x: x.tanh() * x.roll(1), torch.ones(100_000))
J.shape, big.plan(..., 7), big[6:10, 7]

# %% second
# A Hessian is indexed like a Jacobian.
x = torch.tensor([2.0, 3.0])
H = eg.hessian(lambda x: x[0] * x[1] ** 2 + x.sum() ** 2, x)
H[0, 1]

# %% uses
# One share for each use of the element; they add up to the derivative.
x = torch.tensor([1.0, 2.0, 3.0])
shares = eg.contributions(lambda x: 2 * x[2] + x.sum(), x, wrt="x[2]")
direct, through_sum = (share.value for share in shares)
direct, through_sum, shares.total

# %% twice: usual
# Call backward, look, and call it again. Vectorised operations hide nothing
# (it is w[2], 6), but `.grad` adds up.
x = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
w = torch.tensor([4.0, 5.0, 6.0])
(x * w).sum().backward()
first = x.grad[2].clone()
(x * w).sum().backward()
again = x.grad[2]
first, again

# %% twice
# A question changes nothing, so that asking again gives the same.
x, w = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([4.0, 5.0, 6.0])
first = eg.grad(lambda x: (x * w).sum(), x, wrt="x[2]")
again = eg.grad(lambda x: (x * w).sum(), x, wrt="x[2]")
first, again


# %% own_rule: usual
# A published Function hands the index to `save_for_backward`.
class Weighted(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, i):
        ctx.save_for_backward(x, i)
        return 3 * x[i] + x.sum()

    @staticmethod
    def backward(ctx, g):
        x, i = ctx.saved_tensors
        slope = torch.ones_like(x)
        slope[i] += 3
        return g * slope, None


x = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
Weighted.apply(x, 2).backward()
x.grad[2]


# %% own_rule
# An index is not a tensor: it goes on the context. `eg.check` compares
# the rule with differences.
class Weighted(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, i):
        ctx.save_for_backward(x)
        ctx.i = i
        return 3 * x[i] + x.sum()

    @staticmethod
    def backward(ctx, g):
        slope = torch.ones_like(ctx.saved_tensors[0])
        slope[ctx.i] += 3
        return g * slope, None


x = torch.tensor([1.0, 2.0, 3.0])
slope = eg.grad(lambda x: Weighted.apply(x, 2), x, wrt="x[2]")
verdict = eg.check(lambda x: Weighted.apply(x, 2), x).verdict
slope, verdict

# %% written: usual
# Ask PyTorch for the gradient of one by the other.
t = torch.tensor([3.0, 0, 0, 0, 0], requires_grad=True).clone()
t[1] = 2 * t[0]
t[3] = t[1] ** 2 + t[0]
t[4] = t[3] * t[1]
(slope,) = torch.autograd.grad(t[4], t[1])
slope

# %% written
# Record the tensor before it is written to, and ask for elements of it.
t = torch.tensor([3.0, 0, 0, 0, 0])
with eg.record(t) as rec:
    t[1] = 2 * t[0]
    t[3] = t[1] ** 2 + t[0]
    t[4] = t[3] * t[1]
slope = rec.grad(eg.at(t)[4], eg.at(t)[1])
slope

# %% message: usual
# Widespread advice: `loss.requires_grad_()`. The message goes away, and
# nothing learns.
features = net.tanh2(net.conv2(net.tanh1(net.conv1(image)))).detach()
loss = (features**2).mean()
try:
    loss.backward()
except RuntimeError as error:
    message = str(error)
loss.requires_grad_()
loss.backward()
learning = sum(p.grad is not None for p in net.parameters())
message, learning


# %% message
# The message is not about your x[0]: "element 0 of tensors" is the first
# tensor that you called backward on, the loss. `eg.explain` names the line
# that cut it off.
def step():
    features = net.conv2(net.tanh1(net.conv1(image)))
    features = net.tanh2(features).detach()
    loss = (features**2).mean()
    loss.backward()


diagnosis = eg.explain(step)
diagnosis.sentence, diagnosis.where, diagnosis.fix

# %% three_ways
# By index, by gather and by mask: the same gradient.
x = torch.tensor([3.0, 4.0, 5.0], requires_grad=True)
(by_index,) = torch.autograd.grad(x[0] ** 2, x)
gathered = x.gather(0, torch.tensor([0]))
(by_gather,) = torch.autograd.grad((gathered**2).sum(), x)
(by_mask,) = torch.autograd.grad((x[x < 4] ** 2).sum(), x)
(by_place,) = torch.autograd.grad(eg.at(x)[0].get() ** 2, x)
by_index, by_gather, by_mask, by_place

# %% element_zero: usual
# Let the element require it. But `x[0]` is a new tensor each time.
x = torch.tensor([3.0, 4.0, 5.0])
x[0].requires_grad_()
(x[0] ** 2).backward()
x.grad

# %% element_zero
# The tensor requires it, and `only` lets it reach the element.
x = torch.tensor([3.0, 4.0, 5.0], requires_grad=True)
(eg.at(x)[0].only() ** 2).sum().backward()
x.grad

# %% choice: usual
# Take the element with the largest logit: nothing comes back from `argmax`.
x, logits = (
    torch.tensor([3.0, 1.0, 2.0]),
    torch.zeros(3, requires_grad=True),
)
chosen = x[logits.argmax()]
((chosen - 1.0) ** 2).backward()
logits.grad

# %% choice
# `choose` learns which element comes nearest to 1.
x, logits = (
    torch.tensor([3.0, 1.0, 2.0]),
    torch.zeros(3, requires_grad=True),
)
optimizer = torch.optim.SGD([logits], lr=1.0)
for _ in range(200):
    optimizer.zero_grad()
    ((eg.choose(x, logits) - 1.0) ** 2).backward()
    optimizer.step()
weights, chosen = logits.softmax(0), eg.choose(x, logits, hard=True)
weights, chosen

# %% entry: usual
# Multiply the gradient by a mask. Weight decay and earlier momentum do not
# ask the gradient: they move the other 999 entries as well.
mask = torch.zeros(100, 10)
mask[0, 5] = 1


def leaked(kind, masked_from=0, **options):
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Embedding(100, 10), torch.nn.Linear(10, 2)
    )
    table = model[0].weight
    optimizer = kind(model.parameters(), lr=0.1, **options)
    for step in range(5):
        if step == masked_from:
            before = table.detach().clone()
        optimizer.zero_grad()
        model(torch.arange(100)).square().sum().backward()
        if step >= masked_from:
            table.grad *= mask
        optimizer.step()
    return int((table != before)[mask == 0].sum())


sgd = leaked(torch.optim.SGD)
momentum = leaked(torch.optim.SGD, masked_from=1, momentum=0.9)
adam = leaked(torch.optim.Adam, masked_from=1)
adamw = leaked(torch.optim.AdamW)
sgd, momentum, adam, adamw


# %% entry
# The optimizer is given the one entry and nothing else that it could move:
# not by a bit, whichever optimizer it is.
def moved(kind, **options):
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Embedding(100, 10), torch.nn.Linear(10, 2)
    )
    before = {name: p.clone() for name, p in model.state_dict().items()}
    elements = eg.trainable(model, "0.weight[0, 5]")
    optimizer = kind(elements.parameters(), lr=0.1, **options)
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.arange(100)).square().sum().backward()
        optimizer.step()
    after = model.state_dict()
    return [
        f"{name}{where}"
        for name, old in before.items()
        for where in (after[name] != old).nonzero().tolist()
    ]


sgd = moved(torch.optim.SGD)
momentum = moved(torch.optim.SGD, momentum=0.9, weight_decay=0.1)
adam = moved(torch.optim.Adam)
adamw = moved(torch.optim.AdamW, weight_decay=0.1)
sgd, momentum, adam, adamw

# %% token: usual
# Give the optimizer the entry.
entry = reader.embedding.weight[0, 12]
optimizer = torch.optim.Adam([entry], lr=0.1)
optimizer

# %% token
# Of the whole model, only number 12 of "the" is trained further:
# "cat" is to come next.
elements = eg.trainable(reader, "embedding.weight[0, 12]")
optimizer = torch.optim.Adam(elements.parameters(), lr=0.1)
steps, chances = [], []
for _ in range(12):
    optimizer.zero_grad()
    loss = losses(1, 43, 2, 18, 0)[2]  # a brave cat sees the ... cat
    loss.backward()
    optimizer.step()
    steps.append(
        {place: elements[place].detach().clone() for place in elements}
    )
    chances.append(loss.neg().exp().item())
elements.release(keep=False)
chances[0], chances[-1]

# %% unseen
# Its word does not occur. The gradient is 0 and not None, and `eg.explain`
# says so.
tokens = torch.tensor([[1, 43, 2, 18, 1]])  # a brave cat sees a
diagnosis = eg.explain(
    reader, tokens, of="output[0, -1, 2]", wrt="embedding.weight[0, 12]"
)
diagnosis.value, diagnosis.sentence, diagnosis.fix

# %% routed: usual
# Add the losses up. Each entry gets both gradients. (The same answer scores
# ten targets against one row, and raises.)
each = losses(1, 43, 2, 18, 0)
(slope,) = torch.autograd.grad(each[2] + each[5], reader.embedding.weight)
the, a = slope[0, 12], slope[1, 25]
try:
    scores = reader(torch.tensor([[1, 43, 2, 18, 0]]))[:, -1]
    torch.nn.functional.cross_entropy(scores, torch.arange(10))
except ValueError as error:
    ten_targets = str(error)
the, a, ten_targets

# %% routed
# Each place is given its own loss: "cat" for "the", "fish" for "a".
places = "embedding.weight[0, 12]", "embedding.weight[1, 25]"
elements = eg.trainable(reader, places)
each = losses(1, 43, 2, 18, 0)
elements.backward({places[0]: each[2], places[1]: each[5]})
the, a = (elements[place].grad for place in places)
elements.release()
the, a

# %% shipped
# Teach the net a digit that it misreads, by one row of the head. A patch is
# as large as what was trained, and can be undone to the bit.
wrong = 1500 + int((net(x[1500:]).argmax(1) != y[1500:]).nonzero()[0])
digit, truth = x[wrong : wrong + 1], y[wrong : wrong + 1]
weights = [p.clone() for p in net.parameters()]
read_as = net(digit).argmax()

elements = eg.trainable(net, f"head.weight[{truth.item()}, :]")
optimizer = torch.optim.AdamW(elements.parameters(), lr=0.01)
while net(digit).argmax() != truth:
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(net(digit), truth).backward()
    optimizer.step()
elements.save(folder / "digit.safetensors")
elements.release(keep=False)
undone = all(map(torch.equal, net.parameters(), weights))

patch = eg.inspect(folder / "digit.safetensors")
applied = eg.apply(net, folder / "digit.safetensors")
now_read_as = net(digit).argmax()
right_now = (net(x[1500:]).argmax(1) == y[1500:]).float().mean()
applied.undo()
truth[0], read_as, now_read_as, right_now, patch.size, undone
