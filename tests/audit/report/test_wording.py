"""Advice follows from the settings of a run and from what was found."""

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from audit.report.example import made_up
from dbcl.audit.findings import Audit, Finding
from dbcl.audit.report.wording import advice
from dbcl.run import RunConfig


def test_advice_follows_from_settings_and_findings():
    notes = " ".join(advice(made_up()))
    for part in ("with a memory", "fc3.weight, fc3.bias", "About 2 clients", "from its seed", "The server is trusted"):
        assert part in notes
    assert "Published attacks fail on update, image, property while" in notes
    safer = {"veil": 0.2, "sketch": "identity-v1", "clients": 100, "fraction": 0.5}
    always = advice(Audit("a", safer, {}, (), (), 0.0))
    assert [note[:22] for note in always] == ["The server is trusted:", "No formal guarantee (d"]
    naive = Audit("a", safer, {}, (), (Finding("forest", "client", "naive", "property", "auc", 0.5),), 0.0)
    assert "No attack that knows the defence gave a result on property" in " ".join(advice(naive))


class Watched(Mapping[str, Any]):
    """Settings that remember what was asked for; nothing is set."""

    def __init__(self) -> None:
        self.asked: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.asked.add(name)
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


def test_advice_asks_only_for_settings_that_exist() -> None:
    settings = Watched()
    advice(Audit("a", settings, {}, (), (), 0.0))
    added_by_the_audit = {"clear"}
    assert settings.asked >= {"veil", "sketch", "clients", "seed"}
    assert settings.asked - added_by_the_audit <= {field.name for field in fields(RunConfig)}
