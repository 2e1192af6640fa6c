"""GAN attack: generate images of a class that only one other client holds (Hitaj et al. 2017).

Reads: client-N.

The attacker is a client that follows the protocol. In every round it trains a generator to produce
images that the received model classifies as the victim's class. It labels the generated images with
an extra class, `fake`, and trains on them together with its other examples. The victim's updates
must then separate its class from `fake`. The shared model thus acts as the discriminator of a GAN
whose real images only the victim has. The attack estimates no update and needs no earlier round;
defences that hide updates do not prevent it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dbcl.data import Dataset, TensorExamples
from dbcl.data.examples import Rows
from dbcl.engines import StackedEngine
from dbcl.errors import ConfigError
from dbcl.model import networks
from dbcl.protocol import Broadcast, Update, blinded
from dbcl.transcripts import Transcript
from dbcl_audit import image_quality as quality
from dbcl_audit.estimators.observations import tensor_observations
from dbcl_audit.estimators.smoother import known_scales, smoother

ATTACKER, VICTIM = 0, 1
BLOCK_SIZES = (2, 4, 7)
"""Side lengths, in pixels, of the blocks from which non-image patterns are made."""
KEPT_ROUNDS = 5
"""Number of rounds whose generated images are kept. With fewer, the model forgets older images and
the generator can cycle.
"""


@dataclass(frozen=True)
class GanSettings:
    """Settings of the attacker's generator.

    Args:
        target: class that only the victim holds.
        steps: Adam steps in every round in which the attacker takes part.
        batch: generated images per step.
        lr: learning rate of Adam.
        latent: dimension of the generator's noise input.
        channels: channels after the first convolution; the dense layer has twice as many.
        tv: weight of the total variation of the generated images.

    >>> GanSettings(target=3, steps=0)
    Traceback (most recent call last):
        ...
    dbcl.errors.ConfigError: steps, batch, latent and channels must be at least 1, got 0, 32, 64, 16
    """

    target: int
    """Class that only the victim holds."""
    steps: int = 10
    batch: int = 32
    lr: float = 1e-3
    latent: int = 64
    channels: int = 16
    tv: float = 0.1
    """Weight of the total variation of the generated images. The prior for smoothness comes from
    the attacker's own images.
    """

    def __post_init__(self) -> None:
        sizes = (self.steps, self.batch, self.latent, self.channels)
        if min(sizes) < 1:
            raise ConfigError(f"steps, batch, latent and channels must be at least 1, got {', '.join(map(str, sizes))}")


def generator(shape: Sequence[int], settings: GanSettings) -> nn.Module:
    """Build a small DCGAN generator: a dense layer and two upsampling convolutions from noise to
    pixels in [-1, 1].

    >>> generator((1, 28, 28), GanSettings(target=3))(torch.zeros(2, 64)).shape
    torch.Size([2, 1, 28, 28])
    """
    channels, height, width = shape
    if height % 4 or width % 4:
        raise ConfigError(f"the generator doubles its images twice: {height} x {width} must be divisible by 4")
    wide, narrow = 2 * settings.channels, settings.channels
    return nn.Sequential(
        nn.Linear(settings.latent, wide * height * width // 16),
        nn.Unflatten(1, (wide, height // 4, width // 4)),
        nn.BatchNorm2d(wide),
        nn.ReLU(),
        nn.Upsample(scale_factor=2, mode="bilinear"),
        nn.Conv2d(wide, narrow, 3, padding=1),
        nn.BatchNorm2d(narrow),
        nn.ReLU(),
        nn.Upsample(scale_factor=2, mode="bilinear"),
        nn.Conv2d(narrow, channels, 3, padding=1),
        nn.Tanh(),
    )


class GanAttacker:
    """Generator of the attacking client. The received models serve as discriminators.

    Args:
        shape: shape of an image.
        box: range of the pixel values.
        settings: settings of the generator.
        count: number of images in `drawings`, generated against the last `KEPT_ROUNDS` models.
        seed: seed of the generator's weights and noise.

    >>> attacker = GanAttacker((1, 28, 28), (-1.0, 1.0), GanSettings(target=3, steps=2), count=10, seed=0)
    >>> attacker.learn(networks.build("mnist-mlp", outputs=11))
    >>> attacker.drawings.shape
    torch.Size([10, 1, 28, 28])
    """

    def __init__(
        self, shape: Sequence[int], box: tuple[float, float], settings: GanSettings, *, count: int, seed: int
    ) -> None:
        self.settings, self.box, self.turns = settings, box, 0
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.generator = generator(shape, settings)
        self.noise = torch.Generator().manual_seed(seed)
        self.optimizer = torch.optim.Adam(self.generator.parameters(), lr=settings.lr, betas=(0.5, 0.999))
        self.drawings = self._drawn(count)

    def learn(self, model: nn.Module) -> None:
        """Train the generator to produce images that the model assigns to the victim's class, then
        replace the oldest generated images.
        """
        model.eval()
        self.generator.train()
        wanted = torch.full((self.settings.batch,), self.settings.target)
        for _ in range(self.settings.steps):
            self.optimizer.zero_grad()
            drawn = self._images(self.settings.batch)
            loss = F.cross_entropy(model(drawn), wanted) + self.settings.tv * _variation(drawn)
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
        place = self.turns % KEPT_ROUNDS
        self.drawings[place::KEPT_ROUNDS] = self._drawn(len(self.drawings[place::KEPT_ROUNDS]))
        self.turns += 1

    @torch.no_grad()
    def _drawn(self, count: int) -> Tensor:
        self.generator.eval()
        return self._images(count)

    def _images(self, count: int) -> Tensor:
        low, high = self.box
        noise = torch.randn(count, self.settings.latent, generator=self.noise)
        drawn: Tensor = low + (high - low) * (self.generator(noise) + 1) / 2
        return drawn


class GanEngine(StackedEngine):
    """Engine with one attacking client that trains a generator on each broadcast and trains on the
    generated images.

    `drawings` holds the indices of the generated images among the examples of all clients. With
    None the attacker does not train on the generated images.

    >>> import dbcl
    >>> from dbcl.engines import LocalTraining
    >>> net = networks.build("mnist-mlp", outputs=11)
    >>> examples = TensorExamples(torch.zeros(12, 1, 28, 28), torch.arange(12) % 10)
    >>> clients = examples.divide([np.arange(6), np.arange(6, 12)])
    >>> engine = GanEngine(dbcl.Server(net), net, clients, LocalTraining(), seed=bytes(32))
    >>> settings = GanSettings(target=3, steps=1)
    >>> engine.attacker = GanAttacker((1, 28, 28), (-1.0, 1.0), settings, count=2, seed=0)
    >>> engine.drawings = np.arange(2)
    >>> engine.play_round().report.accepted, bool(examples.inputs[:2].equal(engine.attacker.drawings))
    (2, True)
    """

    attacker: GanAttacker | None = None
    drawings: Rows | None = None

    def train_cohort(self, sent: Mapping[int, Broadcast]) -> Mapping[str, Update | bytes]:
        if self.attacker is not None and ATTACKER in sent:
            self.attacker.learn(blinded(self.template, sent[ATTACKER]))
            own = self.clients[ATTACKER]
            if self.drawings is not None:
                assert isinstance(own, TensorExamples)
                assert isinstance(own.inputs, Tensor)
                own.inputs[torch.from_numpy(self.drawings)] = self.attacker.drawings.to(own.inputs)
        return super().train_cohort(sent)


def _variation(images: Tensor) -> Tensor:
    """Mean absolute difference of neighbouring pixels."""
    return images.diff(dim=-1).abs().mean() + images.diff(dim=-2).abs().mean()


def with_drawings(dataset: Dataset, drawings: int) -> Dataset:
    """Return the dataset with one additional class, whose training examples are placeholders for
    the generated images.

    >>> from dbcl import data
    >>> more = with_drawings(data.load("digits"), 50)
    >>> more.outputs, len(more.y_train), int(more.y_train[-1])
    (11, 4050, 10)
    """
    blank = torch.full((drawings, *dataset.shape), quality.span(dataset)[0])
    labels = torch.full((drawings,), dataset.outputs)
    return replace(
        dataset,
        x_train=torch.cat([dataset.x_train, blank]),
        y_train=torch.cat([dataset.y_train, labels]),
        outputs=dataset.outputs + 1,
    )


def divide_classes(labels: Tensor, target: int, fake: int, clients: int, *, held: bool = True) -> list[Rows]:
    """Divide examples: the target class to the victim, the generated images to the attacker, all
    others evenly to all clients.

    With `held=False` no client has the target class. Generated images of the class then cannot
    reflect the victim's data.

    >>> rows = divide_classes(torch.tensor([0, 0, 1, 1, 2, 2, 3, 3]), target=1, fake=3, clients=2)
    >>> [sorted(torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])[row].tolist()) for row in rows]
    [[0, 2, 3, 3], [0, 1, 1, 2]]
    """
    classes = labels.numpy()
    shared = np.flatnonzero((classes != target) & (classes != fake))
    order = np.argsort(classes[shared], kind="stable")  # dealt out class by class, so that all have the same share
    parts = [shared[order[number::clients]] for number in range(clients)]
    parts[ATTACKER] = np.concatenate([parts[ATTACKER], np.flatnonzero(classes == fake)])
    if held:
        parts[VICTIM] = np.concatenate([parts[VICTIM], np.flatnonzero(classes == target)])
    return parts


def estimated_models(transcript: Transcript) -> Iterator[nn.Module]:
    """Yield the model of each round with unsketched weights W, as estimated by a smoother from all
    rounds.

    >>> from dbcl_audit.examples import example_batches
    >>> played = example_batches("paper", model="dlg-lenet")
    >>> len(list(estimated_models(played.attacker)))
    3
    """
    seen, veil = tensor_observations(transcript), transcript.setting.veil
    walks = {name: smoother(view, known_scales(view, veil)).weights(view) for name, view in seen.items()}
    for _ in transcript.rounds:
        model = transcript.template()
        own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        with torch.no_grad():
            for name, walk in walks.items():
                layout, weights = seen[name].layout, next(walk)
                whole = weights if layout is None else layout.weight(weights)
                own[name].copy_(whole.reshape(own[name].shape))
        yield model


def judge(dataset: Dataset, *, steps: int, seed: int = 0) -> nn.Module:
    """Train a CNN on the held-out examples, which no party of the run has.

    The CNN has one additional class for patterns that are not images of any class: held-out images
    with permuted blocks of pixels, and smooth noise.

    >>> from dbcl import data
    >>> judge(data.load("digits"), steps=1)(torch.zeros(2, 1, 28, 28)).shape
    torch.Size([2, 11])
    """
    model = networks.build("mnist-cnn", shape=dataset.shape, outputs=dataset.outputs + 1, seed=seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    rng = np.random.default_rng(seed)
    for number in range(steps):
        rows = torch.from_numpy(rng.integers(len(dataset.y_test), size=64))
        whole, block = dataset.x_test[rows], BLOCK_SIZES[number % len(BLOCK_SIZES)]
        none = torch.cat([scrambled(whole[::2], block, rng), blots(whole[1::2], block, quality.span(dataset), rng)])
        labels = torch.cat([dataset.y_test[rows], torch.full((len(none),), dataset.outputs)])
        optimizer.zero_grad()
        F.cross_entropy(model(torch.cat([whole, none])), labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return model.eval()


def scrambled(images: Tensor, block: int, rng: np.random.Generator) -> Tensor:
    """Permute the blocks of pixels of each image.

    >>> mixed = scrambled(torch.arange(16.0).view(1, 1, 4, 4), 2, np.random.default_rng(0))
    >>> mixed.shape, sorted(mixed.flatten().tolist()) == list(range(16))
    (torch.Size([1, 1, 4, 4]), True)
    """
    blocks = F.unfold(images, block, stride=block)  # (n, channels * block^2, blocks)
    places = torch.from_numpy(rng.permuted(np.tile(np.arange(blocks.shape[2]), (len(blocks), 1)), axis=1))
    mixed = blocks.gather(2, places[:, None].expand_as(blocks))
    return F.fold(mixed, images.shape[-2:], block, stride=block)


def blots(like: Tensor, block: int, box: tuple[float, float], rng: np.random.Generator) -> Tensor:
    """Draw smooth noise with the shape of the images: one normal value per block of pixels,
    interpolated and clamped to the box.

    >>> found = blots(torch.zeros(3, 1, 28, 28), 7, (-1.0, 1.0), np.random.default_rng(0))
    >>> found.shape, float(found.abs().max()) <= 1
    (torch.Size([3, 1, 28, 28]), True)
    """
    count, channels, height, width = like.shape
    coarse = rng.normal(size=(count, channels, height // block, width // block))
    shift, contrast = (torch.from_numpy(rng.uniform(*ends, size=(count, 1, 1, 1))) for ends in ((-0.5, 1), (0.1, 1)))
    smooth = F.interpolate(torch.from_numpy(coarse), size=(height, width), mode="bilinear")
    low, high = box
    return (low + (high - low) * (contrast * (smooth - shift)).clamp(0, 1)).to(like)


@dataclass(frozen=True)
class Drawn:
    """Similarity of generated images to the target class.

    Args:
        called: fraction of the images that the judge assigns to the target class.
        nearest: fraction of the images whose nearest class mean is that of the target class.
        psnr: median PSNR against the mean of the target class, in dB.

    >>> Drawn(called=0.9, nearest=0.8, psnr=12.0).called
    0.9
    """

    called: float
    nearest: float
    psnr: float


@torch.no_grad()
def measure(images: Tensor, dataset: Dataset, target: int, judge: nn.Module) -> Drawn:
    """Measure generated images with a judge and with the class means of the held-out examples.

    >>> from dbcl import data
    >>> digits = data.load("digits")
    >>> found = measure(digits.x_test[digits.y_test == 0], digits, 0, nn.Flatten())
    >>> found.nearest > 0.8, 8 < found.psnr < 16
    (True, True)
    """
    box = quality.span(dataset)
    means = torch.stack([dataset.x_test[dataset.y_test == label].mean(dim=0) for label in range(dataset.outputs)])
    each = torch.stack([quality.psnr(images, mean.expand_as(images), box, ordered=True) for mean in means])
    return Drawn(
        called=float((judge(images).argmax(dim=1) == target).double().mean()),
        nearest=float((each.argmax(dim=0) == target).double().mean()),
        psnr=float(each[target].median()),
    )
