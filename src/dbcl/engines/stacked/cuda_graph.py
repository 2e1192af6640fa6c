"""Training loop on a GPU that captures its step in a CUDA graph once and replays it."""

import torch
from torch import Tensor

from dbcl.engines.stacked.batch import Params
from dbcl.engines.stacked.dropout import device_masks
from dbcl.engines.stacked.loop import TrainingLoop
from dbcl.engines.stacked.schedule import Schedule
from dbcl.engines.stacked.stage_path import StageStack
from dbcl.engines.training import LocalTraining


class CudaGraphLoop:
    """`TrainingLoop` whose step is a CUDA graph. The graph is reused in later rounds with the same
    shapes and settings.
    """

    def __init__(self, stack: StageStack, training: LocalTraining, x: Tensor, y: Tensor, schedule: Schedule) -> None:
        self.key = self._key(stack, training, x, schedule)
        self.stack = stack
        self.loop = TrainingLoop(stack, training, 0.0, stack.start(), x, y, schedule)
        self.losses = self.loop.weight.new_zeros(schedule.steps, schedule.clients)
        self.step_number = torch.zeros(1, dtype=torch.int64, device=x.device)
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # libraries initialise in their first calls, which cannot be captured
            for _ in range(2):
                self._step()
                self.step_number.zero_()
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self._step()

    @staticmethod
    def _key(stack: StageStack, training: LocalTraining, x: Tensor, schedule: Schedule) -> object:
        # With its rows: cohorts of other sizes lie at the same address, and a graph knows how long its examples are.
        return stack.addresses(), training, x.data_ptr(), x.shape, schedule.index.shape, schedule.padded

    def fits(self, stack: StageStack, training: LocalTraining, x: Tensor, schedule: Schedule) -> bool:
        """Return whether the captured graph supports this schedule."""
        return stack is self.stack and self._key(stack, training, x, schedule) == self.key

    def _step(self) -> None:
        loop = self.loop
        rows, labels, weight = (
            table.index_select(0, self.step_number)[0] for table in (loop.rows, loop.labels, loop.weight)
        )
        losses = loop.step(loop.inputs(rows), labels, weight, device_masks(weight))
        self.losses.index_copy_(0, self.step_number, losses.unsqueeze(0))
        self.step_number.add_(1)

    def run(self, rate: float, y: Tensor, schedule: Schedule, dropout_seeds: list[int]) -> tuple[Params, Tensor]:
        """Run all steps from the broadcast weights; return the parameters and the losses, (steps,
        clients).
        """
        loop = self.loop
        loop.rate.fill_(rate)
        for name, tensor in self.stack.sent.items():
            torch.index_select(tensor, 0, self.stack.lane_of, out=loop.params[name])
        for name, tensor in loop.proximal_centre.items():
            tensor.copy_(loop.params[name])
        for tensor in loop.momentum.values():
            tensor.zero_()
        index = schedule.index.to(y.device)
        loop.rows.copy_(index.flatten(1))
        loop.labels.copy_(y[index])
        loop.weight.copy_(schedule.weight)
        self.step_number.zero_()
        with torch.random.fork_rng(devices=[y.device]):
            torch.cuda.manual_seed(dropout_seeds[0])
            for _ in range(schedule.steps):
                self.graph.replay()
        return loop.params, self.losses
