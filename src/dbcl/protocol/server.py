"""The server: the only place that holds the true weights."""

import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dbcl import seeds
from dbcl.blind import blind, lift, veil_sizes
from dbcl.cover import Cover, broadcast_tensors
from dbcl.errors import PlanError, ProtocolError
from dbcl.optim import ServerOptimizer, fedavg
from dbcl.plan import Ratio, SketchPlan
from dbcl.protocol.aggregation import Admission, Door, average, average_metrics, norm
from dbcl.protocol.codec import WIRE_DTYPES
from dbcl.protocol.messages import Broadcast, RoundReport, Update, mismatches


class Server:
    """Holds the model W and runs the rounds: `open_round` blinds it, `close_round` steps on the lifted average.

    `ratio`, `cover`, `veil` and `sketch` are those of `SketchPlan.of`; or give a `plan`. `wire` names the dtype that
    travels ("float64", "float32", "bfloat16", "float16"; the model's own where it is None). The round's seed and veil
    come from the operating system, anew in every round; `insecure_seed` fixes them all, so that a run can be
    repeated, and must never be set where clients are strangers. With `average` above 0 the server also keeps
    `averaged`, a running mean of W over about 1 / (1 - average) rounds: the noise of single rounds is gone from it, and
    it is what to evaluate and to use. Clients never get it; they go on from W.

    >>> import torch, dbcl
    >>> def net():
    ...     return torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    >>> server = dbcl.Server(net(), ratio=2)
    >>> broadcast = server.open_round()
    >>> local = dbcl.blinded(net(), broadcast)
    >>> optimizer = torch.optim.SGD(local.parameters(), lr=0.1)
    >>> local(torch.ones(5, 8)).square().mean().backward()
    >>> optimizer.step()
    >>> answer = dbcl.update(local, broadcast, examples=5)
    >>> report = server.close_round([answer])
    >>> report.accepted, report.refused, server.round
    (1, (), 1)
    """

    def __init__(
        self,
        model: nn.Module,
        plan: SketchPlan | None = None,
        *,
        ratio: Ratio | None = None,
        cover: Cover | None = None,
        veil: float | None = None,
        sketch: str | None = None,
        optimizer: ServerOptimizer | None = None,
        door: Door | None = None,
        wire: str | None = None,
        ema_decay: float = 0.0,
        insecure_seed: int | None = None,
    ) -> None:
        given = {"ratio": ratio, "cover": cover, "veil": veil, "sketch": sketch}
        settings: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        if plan is not None and settings:
            raise PlanError(f"give either a plan or {', '.join(settings)}, not both")
        if wire is not None and wire not in WIRE_DTYPES:
            raise ProtocolError(f"wire must be one of {', '.join(WIRE_DTYPES)}, got {wire!r}")
        if not 0 <= ema_decay < 1:
            raise ProtocolError(f"ema_decay must be at least 0 and below 1, got {ema_decay}")
        self.model = model
        self.average = ema_decay
        self.averaged = copy.deepcopy(model) if ema_decay else model
        self.plan = plan or SketchPlan.of(model, **settings)
        if {t.name: t.shape for t in self.plan.tensors} != {
            n: tuple(t.shape) for n, t in broadcast_tensors(model).items()
        }:
            raise PlanError("this plan was made for another model: names or shapes differ")
        self.door = door or Door()
        self.round = 0
        self._wire = WIRE_DTYPES[wire] if wire is not None else None
        self._master = None if insecure_seed is None else seeds.derive(bytes(32), "experiment", insecure_seed)
        self._key = self._new_key()
        self._open: Broadcast | None = None
        self._trained = [p for p in model.parameters() if p.requires_grad]
        self._optimizer = (optimizer or fedavg())(self._trained)

    def open_round(self) -> Broadcast:
        """Blind the model for this round. Until the round is closed, every call gives the same broadcast.

        A second veil of the same weights would let a client average the noise away, so there never is one: the
        round's key is drawn when the round before it closes, it is in the checkpoint, and all noise follows from it.
        """
        if self._open is None:
            plan = self.plan.draw(seeds.derive(self._key, "sketch"), self.round)
            taus = veil_sizes(self.model, self.plan)
            sent = blind(self.model, plan, taus=taus, veil_key=seeds.derive(self._key, "veil"))
            self._open = Broadcast(plan, {name: tensor.to(self._wire) for name, tensor in sent.items()})
        return self._open

    def close_round(self, updates: Iterable[Update | bytes]) -> RoundReport:
        """Check the answers, average those that pass, lift the average, and step.

        An answer may be an `Update` or its bytes. One that does not pass is refused with a reason in the report. Where
        fewer than `min_updates` are left, that is a `ProtocolError`, nothing has changed and the round stays open.
        """
        admission = self.admit((f"update {number}", answer) for number, answer in enumerate(updates))
        admission.require(self.door.min_updates)
        return self.close_averaged(admission)

    def close_averaged(self, admission: Admission) -> RoundReport:
        """Close the round with what was admitted: average, lift the average, and step."""
        weights = broadcast_tensors(self.model)
        mean = average(list(admission.accepted.values()), weights)
        changes = lift(self._opened().plan, mean)
        if not all(torch.isfinite(weights[name] + change).all() for name, change in changes.items()):
            raise ProtocolError(f"round {self.round}: the average update leaves the range of the weights' dtype")
        self._step(weights, changes)
        return self._close(admission, norm(mean))

    def admit(self, answers: Iterable[tuple[str, Update | bytes]]) -> Admission:
        """Let the answers to the open round through the door, each with the name of who sent it; nothing changes yet.

        With `lifted` and `close_with` this is `close_round` for somebody who brings an aggregation of their own.
        """
        broadcast = self._opened()
        accepted, refused = {}, {}
        for who, answer in answers:
            try:
                accepted[who] = self.door.admit(answer, broadcast)
            except ProtocolError as error:
                refused[who] = str(error)
        return Admission(broadcast.round, accepted, refused)

    def lifted(self, admission: Admission) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """For every client that was admitted, the weights it would have made: W + dV R^T, clipped by the door.

        >>> import dbcl
        >>> server = Server(nn.Linear(6, 2), cover="all")
        >>> broadcast = server.open_round()
        >>> answer = dbcl.update(dbcl.blinded(nn.Linear(6, 2), broadcast), broadcast, examples=1)
        >>> same = dict(server.lifted(server.admit([("me", answer)])))
        >>> torch.equal(same["me"]["weight"], server.model.weight)
        True
        """
        plan = self._opened().plan
        weights = {name: tensor.detach() for name, tensor in broadcast_tensors(self.model).items()}
        for who, each in admission.accepted.items():
            changes = lift(plan, {name: each.update.tensors[name].to(W) for name, W in weights.items()})
            yield who, {name: torch.add(W, changes[name], alpha=each.scale) for name, W in weights.items()}

    def close_with(self, admission: Admission, weights: Mapping[str, Tensor]) -> RoundReport:
        """Close the round with new weights that somebody else made of what was admitted.

        The server's own optimiser takes no part. Weights are cast to the dtypes of the model; where one is missing, has
        another shape or is not finite, that is a `ProtocolError`, nothing has changed and the round stays open.

        >>> server = Server(nn.Linear(6, 2), cover="all")
        >>> broadcast = server.open_round()
        >>> server.close_with(Admission(0, {}, {}), {"weight": torch.ones(2, 6), "bias": torch.ones(2)}).round
        0
        """
        self._opened()
        own = broadcast_tensors(self.model)
        problems = mismatches({name: tuple(tensor.shape) for name, tensor in own.items()}, weights)
        new = {} if problems else {name: weights[name].to(tensor) for name, tensor in own.items()}
        problems += [f"{name} is not finite" for name, tensor in new.items() if not torch.isfinite(tensor).all()]
        if problems:
            raise ProtocolError("\n  - ".join([f"round {self.round}: the new weights are no good", *problems]))
        changes = {name: new[name] - tensor.detach() for name, tensor in own.items()}
        trained = {id(parameter) for parameter in self._trained}
        with torch.no_grad():
            for name, tensor in own.items():
                if id(tensor) in trained:
                    tensor.copy_(new[name])
                elif not isinstance(tensor, nn.Parameter):
                    _set_buffer(name, tensor, new[name])
        return self._close(admission, norm(changes))

    def _opened(self) -> Broadcast:
        if self._open is None:
            raise ProtocolError("no round is open: call open_round first")
        return self._open

    def _close(self, admission: Admission, length: float) -> RoundReport:
        admitted = list(admission.accepted.values())
        report = RoundReport(
            round=admission.round,
            accepted=len(admitted),
            refused=admission.reasons,
            clipped=sum(each.scale != 1.0 for each in admitted),
            examples=sum(each.update.examples for each in admitted),
            norm=length,
            metrics=average_metrics([each.update for each in admitted]),
        )
        self.round += 1
        self._average()
        self._key = self._new_key()
        self._open = None
        return report

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """All that is needed to go on after this moment: plain values and tensors, for a checkpoint.

        >>> server = Server(nn.Linear(6, 2), cover="all")
        >>> values, tensors = server.state()
        >>> sorted(values), sorted(tensors)
        (['groups', 'key', 'plan', 'round', 'scalars'], ['model.bias', 'model.weight'])
        """
        optimizer = self._optimizer.state_dict()
        tensors = {f"model.{name}": tensor.detach().clone() for name, tensor in _everything(self.model).items()}
        if self.average:
            kept = _everything(self.averaged)
            tensors |= {f"averaged.{name}": tensor.detach().clone() for name, tensor in kept.items()}
        scalars: dict[str, dict[str, Any]] = {}
        for index, entries in optimizer["state"].items():
            for name, value in entries.items():
                if isinstance(value, Tensor):
                    tensors[f"optimizer.{index}.{name}"] = value.detach().clone()
                else:
                    scalars.setdefault(str(index), {})[name] = value
        values = {
            "round": self.round,
            "key": self._key.hex(),
            "plan": self.plan.digest,
            "groups": optimizer["param_groups"],
            "scalars": scalars,
        }
        return values, tensors

    def load_state(self, values: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Go back to what `state` returned; refuses the state of another plan or model."""
        own = _everything(self.model)
        stored = {name.removeprefix("model."): t for name, t in tensors.items() if name.startswith("model.")}
        kept = {name.removeprefix("averaged."): t for name, t in tensors.items() if name.startswith("averaged.")}
        if values["plan"] != self.plan.digest or stored.keys() != own.keys() or bool(kept) != bool(self.average):
            raise ProtocolError("the checkpoint belongs to another model, another plan or another kind of averaging")
        state: dict[int, dict[str, Any]] = {int(index): dict(entries) for index, entries in values["scalars"].items()}
        for name, tensor in tensors.items():
            if name.startswith("optimizer."):
                _, index, key = name.split(".", 2)
                state.setdefault(int(index), {})[key] = tensor
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(stored[name])
            for name, tensor in _everything(self.averaged).items() if kept else ():
                tensor.copy_(kept[name])
        self._optimizer.load_state_dict({"state": state, "param_groups": values["groups"]})
        self.round = values["round"]
        self._key = bytes.fromhex(values["key"])
        self._open = None

    @torch.no_grad()
    def _average(self) -> None:
        if not self.average:
            return
        # Slowly at first: the mean of few rounds should not remember the initial weights.
        keep = min(self.average, self.round / (self.round + 10))
        current = _everything(self.model)
        for name, mean in _everything(self.averaged).items():
            if mean.is_floating_point():
                mean.lerp_(current[name], 1 - keep)
            else:
                mean.copy_(current[name])

    def _new_key(self) -> bytes:
        return seeds.fresh() if self._master is None else seeds.derive(self._master, "round", self.round)

    def _step(self, weights: Mapping[str, Tensor], changes: Mapping[str, Tensor]) -> None:
        trained = {id(parameter) for parameter in self._trained}
        with torch.no_grad():
            for name, tensor in weights.items():
                if id(tensor) in trained:
                    tensor.grad = -changes[name]
                elif not isinstance(tensor, nn.Parameter):
                    _set_buffer(name, tensor, tensor + changes[name])
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)


def _set_buffer(name: str, buffer: Tensor, value: Tensor) -> None:
    buffer.copy_(value)
    if name.endswith("running_var"):
        buffer.clamp_(min=0)  # a variance must not turn negative; a running mean may


def _everything(model: nn.Module) -> dict[str, Tensor]:
    """Every tensor of a model that a state dict holds, tied ones once."""
    kept = model.state_dict(keep_vars=True)
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in kept}
    return {**dict(model.named_parameters()), **buffers}
