import pytest
import torch

import dbcl
from dbcl.errors import ConfigError
from dbcl.privacy import UpdateNoise, norm


def test_an_update_is_clipped_and_noised() -> None:
    sent = {"w": torch.ones(30, 40), "b": torch.zeros(800)}
    quiet = UpdateNoise(clip=2.0)(sent, round=0)
    assert norm(quiet) == pytest.approx(2.0)
    assert UpdateNoise(clip=1e6)(sent, round=0)["w"].equal(sent["w"])
    noisy = UpdateNoise(clip=2.0, multiplier=0.5, insecure_seed=0)(sent, round=0)
    added = torch.cat([(noisy[name] - quiet[name]).flatten() for name in ("w", "b")])
    assert added.std().item() == pytest.approx(1.0, rel=0.05)  # 2,000 numbers: three standard errors
    assert norm(sent) == pytest.approx(1200**0.5)  # the caller's tensors are not touched


def test_noise_is_fresh_unless_an_experiment_fixes_it() -> None:
    sent = {"w": torch.zeros(50)}
    fresh = [UpdateNoise(1.0, 1.0)(sent, round=0)["w"] for _ in range(2)]
    assert (fresh[0] != fresh[1]).all()
    fixed = [
        UpdateNoise(1.0, 1.0, insecure_seed=seed, client=client)(sent, round=round)["w"]
        for seed, client, round in [(0, 0, 0), (0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]
    ]
    assert fixed[0].equal(fixed[1])
    assert all((fixed[0] != other).all() for other in fixed[2:])


@pytest.mark.parametrize(("clip", "multiplier"), [(0.0, 1.0), (1.0, -1.0)])
def test_noise_that_makes_no_sense_is_refused(clip: float, multiplier: float) -> None:
    with pytest.raises(ConfigError, match="update_clip must be above 0"):
        UpdateNoise(clip, multiplier)


def test_the_verb_noises_before_anything_is_encoded() -> None:
    broadcast = dbcl.Server(torch.nn.Linear(6, 2), dbcl.SketchConfig(coverage="all")).open_round()
    local = dbcl.blinded(torch.nn.Linear(6, 2), broadcast)
    with torch.no_grad():
        local.bias.add_(100.0)
    update = dbcl.make_update(local, broadcast, examples=1, noise=UpdateNoise(clip=0.5))
    assert norm(dbcl.protocol.decode_update(dbcl.encode(update)).tensors) == pytest.approx(0.5)
