"""Contract tests of noise mechanisms."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

import dbcl
from dbcl.privacy import NoiseMechanism

KEYS = [bytes([number]) * 32 for number in range(4)]


def layer() -> nn.Linear:
    """Return the model for the tests, always with the same weights."""
    made = nn.Linear(30, 20)
    with torch.no_grad():
        made.weight.copy_(torch.linspace(-1, 1, 600).reshape(20, 30))
        made.bias.copy_(torch.linspace(-1, 1, 20))
    return made


class NoiseMechanismContract(ABC):
    @abstractmethod
    def veil(self) -> NoiseMechanism:
        """Create a noise mechanism for a model with a 20 x 30 `weight` and a `bias` of length 20.

        The mechanism has not run any round.
        """

    def play(self, veil: NoiseMechanism, first: int, last: int) -> list[Tensor]:
        """Return the noise on the weight in rounds `first` to `last - 1`."""
        noises = []
        for round in range(first, last):
            veil.begin(round, KEYS[round], layer())
            noise = veil.noise(round, "weight", (20, 30))
            assert noise is not None
            noises.append(noise.clone())
            veil.end(round)
        return noises

    def test_noise_has_the_shape_of_w_and_double_precision(self) -> None:
        veil = self.veil()
        veil.begin(0, KEYS[0], layer())
        for name, shape in (("weight", (20, 30)), ("bias", (20,))):
            noise = veil.noise(0, name, shape)
            assert noise is not None
            assert (tuple(noise.shape), noise.dtype, noise.device.type) == (shape, torch.float64, "cpu")
            assert noise.isfinite().all()
            assert noise.std() > 0

    def test_a_round_asked_again_gives_the_same_noise(self) -> None:
        veil = self.veil()
        veil.begin(0, KEYS[0], layer())
        one, two = (veil.noise(0, "weight", (20, 30)) for _ in range(2))
        veil.begin(0, KEYS[0], layer())
        three = veil.noise(0, "weight", (20, 30))
        assert one is not None
        assert two is not None
        assert three is not None
        assert torch.equal(one, two)
        assert torch.equal(one, three)

    def test_rounds_keys_and_tensors_have_noise_of_their_own(self) -> None:
        noises = self.play(self.veil(), 0, 3)
        assert not torch.equal(noises[0], noises[1])
        assert not torch.equal(noises[1], noises[2])
        veil = self.veil()
        veil.begin(0, KEYS[1], layer())
        other = veil.noise(0, "weight", (20, 30))
        assert other is not None
        assert not torch.equal(noises[0], other)

    def test_restored_it_goes_on_with_the_same_noise(self) -> None:
        whole, cut = self.veil(), self.veil()
        expected = self.play(whole, 0, 4)
        self.play(cut, 0, 2)
        revived = self.veil()
        revived.load_state(cut.state())
        assert all(torch.equal(a, b) for a, b in zip(self.play(revived, 2, 4), expected[2:], strict=True))

    def test_restored_in_an_open_round_it_gives_that_rounds_noise_again(self) -> None:
        expected = self.play(self.veil(), 0, 3)
        cut, revived = self.veil(), self.veil()
        self.play(cut, 0, 2)
        cut.begin(2, KEYS[2], layer())
        revived.load_state(cut.state())
        assert torch.equal(self.play(revived, 2, 3)[0], expected[2])

    def test_a_server_sends_w_under_this_noise(self) -> None:
        model = layer().double()
        mechanism = self.veil()
        server = dbcl.Server(model, dbcl.SketchConfig(coverage="all"), noise=mechanism, insecure_seed=0)
        broadcast = server.open_round()
        noise = mechanism.noise(0, "weight", (20, 30))
        assert noise is not None
        sent = broadcast.sketches()["weight"].apply(model.weight.detach() + noise)
        torch.testing.assert_close(broadcast.tensors["weight"], sent)

    def test_it_says_what_it_promises(self) -> None:
        assert self.veil().guarantee().strip()
