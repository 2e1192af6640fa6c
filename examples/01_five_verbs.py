"""Train a digit classifier double-blind with an ordinary PyTorch loop.

Shows the five verbs of a round: `Server`, `open_round`, `blinded`, `update`, `close_round`. Four clients hold a quarter
of the embedded digits each. Between `blinded` and `update` a client runs a plain loop with Adam that knows nothing of
sketches. The printed accuracy is that of a running mean of W, which only the server can measure.

    python examples/01_five_verbs.py
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dbcl
from dbcl.data import iid, load

CLIENTS, ROUNDS, BATCH = 4, 25, 20
RATIO = 2
LR = 0.001 * math.sqrt(RATIO)  # Adam normalises the gradient; plain SGD would keep its learning rate


def net() -> nn.Module:
    """Make the network. The server and every client make one; only its shape has to agree."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 10)
    )


def train(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Make one pass over a client's examples and give the mean loss."""
    optimizer = torch.optim.Adam(model.parameters(), lr=LR)
    losses = []
    for batch in torch.randperm(len(y)).split(BATCH):
        loss = F.cross_entropy(model(x[batch]), y[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return sum(losses) / len(losses)


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    return (model(x).argmax(dim=1) == y).float().mean().item()


def main() -> float:
    """Play the rounds and give the last accuracy."""
    torch.manual_seed(0)  # the initial weights and the batches; the server's secrets are fresh all the same
    digits = load("digits")
    shares = [torch.from_numpy(share) for share in iid(digits.y_train.numpy(), CLIENTS, seed=bytes(32))]

    server = dbcl.Server(net(), dbcl.SketchConfig(ratio=RATIO))  # 1: holds W; the veil is 0.2 unless told otherwise
    print(server.plan)
    reached = 0.0
    for number in range(1, ROUNDS + 1):
        answers = {}
        for client, share in enumerate(shares):
            broadcast = server.open_round(client)  # 2: blinds W; the only thing that leaves the server
            local = dbcl.blinded(net(), broadcast)  # 3: a client's model; W is nowhere in it
            loss = train(local, digits.x_train[share], digits.y_train[share])
            answers[str(client)] = dbcl.make_update(local, broadcast, examples=len(share), metrics={"loss": loss})  # 4
        report = server.close_round(answers)  # 5: checks, averages, lifts, steps
        if number % 5 == 0:
            reached = accuracy(server.released, digits.x_test, digits.y_test)  # a running mean of W
            loss = report.metrics["loss"]
            print(f"round {number:2}: {report.accepted} updates, loss {loss:.3f}, the mean of W is {reached:.1%} right")
    return reached


if __name__ == "__main__":
    main()
