"""Plan a model of your own: a convolution, an LSTM that reads the picture line by line, and an output layer.

Shows how patterns choose what is sketched, what a plan prints, how `adjust` changes single tensors of it, and what a
misspelt pattern answers. Then two rounds are played, over the bytes that a network would carry.

    python examples/02_your_own_model.py
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dbcl
from dbcl.data import load


class LineReader(nn.Module):
    """Reads a 28x28 picture as 28 lines of 8 x 28 features."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 8, kernel_size=3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.lstm = nn.LSTM(8 * 28, 32, batch_first=True)
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:  # (b, 1, 28, 28) -> (b, 10)
        features = torch.relu(self.norm(self.conv(x)))
        lines = features.transpose(1, 2).flatten(2)  # (b, 28, 8 * 28)
        _, (last, _) = self.lstm(lines)
        return self.head(last[-1])


def make_plan(model: nn.Module) -> dbcl.SketchPlan:
    """Sketch all matrices but those of the output layer, the LSTM's with a new width in every round."""
    plan = dbcl.SketchPlan.from_model(model, dbcl.SketchConfig(coverage=["*", "!head.*"], ratio=2, veil=0.2))
    return plan.adjust("lstm.weight_*", ratio=(2, 4)).adjust("head.*", veil=0.5)


def answer(wire: bytes, x: Tensor, y: Tensor) -> bytes:
    """Do what a client does with a broadcast that it received."""
    broadcast = dbcl.protocol.decode_broadcast(wire)
    local = dbcl.blinded(LineReader(), broadcast)
    optimizer = torch.optim.SGD(local.parameters(), lr=0.05, momentum=0.9)
    for batch in torch.randperm(len(y)).split(20):
        optimizer.zero_grad()
        F.cross_entropy(local(x[batch]), y[batch]).backward()
        optimizer.step()
    return dbcl.encode(dbcl.make_update(local, broadcast, examples=len(y)))


def main() -> dbcl.Server:
    """Print the plan and play two rounds."""
    torch.manual_seed(0)
    model = LineReader()
    try:
        dbcl.SketchPlan.from_model(model, dbcl.SketchConfig(coverage=["convolution.*"]))
    except dbcl.errors.PlanError as error:
        print(f"refused: {error}\n")
    plan = make_plan(model)
    print(plan, end="\n\n")

    digits = load("digits")
    mixed = torch.randperm(len(digits.y_train))[:600]  # the digits lie in order
    # Clients would measure BatchNorm's statistics on blinded weights: the server does it, on inputs of its own.
    server = dbcl.Server(
        model, plan, calibration=digits.x_test[:200], validator=dbcl.protocol.UpdateValidator(min_updates=2)
    )
    for _ in range(2):
        answers = {}
        for client, share in zip(("ann", "bob", "eve"), mixed.chunk(3), strict=True):
            broadcast = server.open_round(client)  # in one of two lanes, whose sketches complement each other
            wire = dbcl.encode(broadcast)
            answers[client] = answer(wire, digits.x_train[share], digits.y_train[share])
        report = server.close_round(answers)
        print(f"round {report.round}: {report.accepted} accepted, {len(wire):,} bytes to each client")
        for name, sketch in broadcast.sketches().items():
            print(f"  {name}: {sketch}")
    return server


if __name__ == "__main__":
    main()
