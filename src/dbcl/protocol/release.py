"""The released model: a running mean of W or, under a guarantee, of W + N."""

from collections.abc import Mapping

from torch import Tensor, nn

from dbcl.blinding import copied
from dbcl.protocol.running_mean import RunningMean
from dbcl.protocol.trained_weights import TrainedWeights

EMA_DECAY = 0.8
"""Default decay of the running mean, which averages over about five rounds."""


class Release:
    """Maintains the running mean of the released weights.

    Args:
        trained: The weights W.
        decay: Decay of the running mean; 0 releases the last weights.
        noisy: Release W + N and never W, as a guarantee requires.
    """

    def __init__(self, trained: TrainedWeights, decay: float, *, noisy: bool) -> None:
        self.trained, self.noisy = trained, noisy
        self.mean = RunningMean(decay) if decay != 0 or noisy else None

    def opened(self, noisy: Mapping[str, Tensor], round: int) -> None:
        """Add the noisy weights of a newly opened round to the mean."""
        if self.mean is not None and self.noisy and round > 0:
            self.mean.update(noisy, round)

    def closed(self, rounds: int) -> None:
        """Add the weights after `rounds` rounds to the mean."""
        if self.mean is not None and not self.noisy:
            self.mean.update(self.trained.read(), rounds)

    def model(self, round: int) -> nn.Module:
        """Return the released model. The round must be open if noisy weights are released."""
        own = self.trained.model
        if self.mean is None:
            return own
        if round == 0:
            return copied(own) if self.noisy else own
        return self.mean.model(own, self.trained.calibrate)
