"""The two models of the tour on PyTorch."""


def net():
    """Two convolutions and a head, trained on the first 1500 digits."""
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
    return right


def reader():
    """An embedding of 50 x 32, a GRU of 64 and a head, trained on sentences."""
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
    return likely
