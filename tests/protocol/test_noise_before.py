"""A guarantee whose noise comes before the server's optimiser, and one whose clients count by their examples."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import dbcl
from dbcl import optim
from dbcl.errors import ConfigError, ProtocolError
from dbcl.privacy import PrivacyPlan, independent, norm
from dbcl.protocol.trained_weights import TrainedWeights
from dbcl.testing.nested import nested

PLAN = PrivacyPlan(epsilon=8, delta=1e-5, clip=0.5, rounds=4, clients=8, cohort=4, noise_on_updates=True)
FIRST, SECOND = ["ann", "bob", "cleo", "dan"], ["eve", "fay", "gus", "hal"]


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 2)).double()


def server(plan: PrivacyPlan = PLAN, model: nn.Module | None = None, **more: Any) -> dbcl.Server:
    return dbcl.Server(model or net(), **nested({"privacy": plan, "insecure_seed": 0, "veil": 0.0, **more}))


def play(server: dbcl.Server, examples: dict[str, int], length: float = 1.0) -> dbcl.RoundReport:
    """Everybody sends the same direction, of this length in units of the clip."""
    answers = {}
    for client, count in examples.items():
        broadcast = server.open_round(client)
        ones = {name: torch.ones_like(tensor) for name, tensor in broadcast.tensors.items()}
        tensors = {name: tensor * (length * PLAN.clip / norm(ones)) for name, tensor in ones.items()}
        answers[client] = dbcl.Update(server.round, broadcast.plan.digest, tensors, count, {})
    return server.close_round(answers)


def flat(server: dbcl.Server) -> Tensor:
    return torch.cat([tensor.detach().double().flatten() for tensor in server.weights().values()])


def test_simply_added_the_noise_on_the_weights_is_that_of_noise_after_the_optimiser() -> None:
    """The rows of a layer are 4,000 runs of one number each: nothing but the noise moves, and C is the same."""
    plan = replace(PLAN, rounds=6, clients=12, participations=0, separation=0)
    layer = nn.Linear(1, 4000, bias=False).double()
    own = server(plan, layer, insecure_seed=None, sketch="identity-v1", optimizer=optim.fedavg())
    start, seen = layer.weight.detach().clone(), []
    for round in range(plan.rounds):
        play(own, {f"{(4 * round + place) % 12}": 1 for place in range(4)}, length=0.0)
        assert torch.equal(own.noisy_weights()["weight"], layer.weight)
        seen.append((layer.weight.detach() - start).flatten().numpy())
    after = replace(plan, noise_on_updates=False).mechanism
    n, at = plan.rounds, np.subtract.outer(np.arange(6), np.arange(6))
    A, C = (np.tril(column[np.abs(at)]) for column in (np.ones(n), after.strategy.coefficients(n)))
    B = A @ np.linalg.inv(C)
    expected, found = B @ B.T, np.stack(seen) @ np.stack(seen).T / 4000 / plan.sigma**2
    bound = 5 * np.sqrt((expected**2 + np.outer(expected.diagonal(), expected.diagonal())) / 4000)
    assert (np.abs(found - expected) < bound).all()
    assert plan.sigma == replace(plan, noise_on_updates=False).sigma


def test_the_plan_speaks_of_one_update_and_of_updates_that_are_added() -> None:
    assert PLAN.noise < PLAN.relative(1.0)
    assert PLAN.relative(0.5) == pytest.approx(replace(PLAN, noise_on_updates=False).relative(0.5))
    alone = replace(PLAN, correlation="independent")
    assert alone.strategy == independent()
    assert alone.noise == pytest.approx(alone.sigma)


@pytest.mark.parametrize("change", [{"momentum": 0.5}, {"lr": 0.1}])
def test_the_optimiser_is_no_part_of_such_a_plan(change: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="does not depend on its momentum and lr"):
        replace(PLAN, **change)


def test_adam_steps_on_noisy_updates_on_a_grid() -> None:
    seen: list[Tensor] = []

    class Watched(torch.optim.Adam):
        def step(self, closure: Any = None) -> None:
            seen.append(torch.cat([p.grad.flatten() for group in self.param_groups for p in group["params"]]))
            super().step(closure)

    with pytest.raises(ConfigError, match="or a plan with noise_on_updates=True"):
        server(replace(PLAN, noise_on_updates=False), optimizer=optim.adam())
    own = server(optimizer=lambda parameters: Watched(parameters, lr=0.01))
    play(own, dict.fromkeys(FIRST, 10))
    steps = seen[0] / PLAN.grid
    assert torch.equal(steps, steps.round())
    assert 0.5 * PLAN.sigma < float((seen[0] - seen[0].mean()).square().mean().sqrt()) < 2 * PLAN.sigma
    assert own.guarantee.startswith("none: its secrets follow")
    assert server(insecure_seed=None, optimizer=optim.adam()).guarantee == PLAN.promise


def test_a_run_that_goes_on_from_any_round_ends_with_the_same_bits() -> None:
    ends = []
    for stops in (False, True):
        own = server(optimizer=optim.adam())
        for clients in (FIRST, SECOND, FIRST, SECOND):
            play(own, dict.fromkeys(clients, 10))
            if stops:
                state, own = own.state(), server(optimizer=optim.adam())
                own.load_state(state)
        ends.append(flat(own))
    assert torch.equal(*ends)


def test_without_a_seed_every_round_draws_noise_of_its_own() -> None:
    ends = [server(insecure_seed=None) for _ in range(2)]
    for own in ends:
        play(own, dict.fromkeys(FIRST, 10))
    assert float((flat(ends[0]) - flat(ends[1])).abs().max()) > PLAN.sigma / 10


def test_a_step_that_is_undone_uses_no_noise_up(monkeypatch: pytest.MonkeyPatch) -> None:
    own, undisturbed = server(optimizer=optim.adam()), server(optimizer=optim.adam())
    step = TrainedWeights.step

    def breaks(self: TrainedWeights, *arguments: Any) -> None:
        step(self, *arguments)
        raise ProtocolError("in the middle")

    for clients in (FIRST, SECOND):
        with monkeypatch.context() as patched:
            patched.setattr(TrainedWeights, "step", breaks)
            with pytest.raises(ProtocolError, match="in the middle"):
                play(own, dict.fromkeys(clients, 10))
        for each in (own, undisturbed):
            play(each, dict.fromkeys(clients, 10))
    assert torch.equal(flat(own), flat(undisturbed))
    assert own.keeper.tracker is not None
    assert own.keeper.tracker.uses("ann") == 1


def test_the_budget_ends_it() -> None:
    own = server()
    for clients in (FIRST, SECOND, FIRST, SECOND):
        play(own, dict.fromkeys(clients, 10))
    with pytest.raises(ProtocolError, match="budget of 4 rounds is spent"):
        play(own, dict.fromkeys(FIRST, 10))


# Clients that count by their examples, up to a public number


@pytest.mark.parametrize("before", [False, True])
def test_clients_count_by_their_examples_up_to_a_public_number(before: bool) -> None:
    plan = replace(PLAN, noise_on_updates=before, weight_cap=20.0)
    moved = []
    for examples in ({"ann": 10}, {"ann": 20}, {"ann": 1000}, {"ann": 10, "bob": 5}, {}):
        own = server(plan, lanes=1)
        play(own, {"zoe": 1, **examples})
        moved.append(flat(own))
    lengths = [float((each - moved[-1]).norm()) * plan.cohort / plan.clip for each in moved[:-1]]
    tolerance = plan.grid * math.sqrt(len(moved[0])) * plan.cohort / plan.clip if before else 1e-9
    assert lengths == pytest.approx([0.5, 1.0, 1.0, 0.75], abs=tolerance)
    assert "weighted by their examples up to 20" in plan.promise


def test_such_weights_are_for_clients() -> None:
    with pytest.raises(ConfigError, match="weight_cap is for clients"):
        replace(
            PLAN, unit="example", examples=100, batch=10, delta=1e-5, weight_cap=20.0, separation=0, participations=0
        )
    with pytest.raises(ConfigError, match="weight_cap must be 0 or more"):
        replace(PLAN, weight_cap=-1.0)
