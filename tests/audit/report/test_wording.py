"""Advice follows from the settings of a run and from what was found."""

from collections.abc import Iterator, Mapping
from typing import Any

from audit.report.example import made_up
from dbcl.simulation import RunConfig
from dbcl_audit.findings import Audit, Finding
from dbcl_audit.report.wording import advice, sentence, verdicts


def test_advice_follows_from_settings_and_findings():
    notes = " ".join(advice(made_up()))
    for part in ("with a memory", "fc3.weight, fc3.bias", "About 2 clients", "from its seed", "The server is trusted"):
        assert part in notes
    assert "Published attacks fail on update, image, property, membership while" in notes
    safer = {"veil": 0.2, "sketch": "identity-v1", "clients": 100, "fraction": 0.5}
    always = advice(Audit("a", safer, {}, (), (), 0.0))
    assert [note[:22] for note in always] == ["The server is trusted:", "No formal guarantee (d"]
    naive = Audit("a", safer, {}, (), (Finding("forest", "client", "naive", "property", "auc", 0.5),), 0.0)
    assert "No attack that knows the defence gave a result on property" in " ".join(advice(naive))


def test_colluders_have_a_verdict_of_their_own_where_they_were_simulated():
    alone = Finding("smoother", "client", "adaptive", "update", "cosine", 0.2)
    together = Finding("smoother", "colluders", "adaptive", "update", "cosine", 0.99)
    assert len(verdicts(Audit("a", {"veil": 0.2}, {}, (), (alone,), 0.0))) == 3
    said = verdicts(Audit("a", {"veil": 0.0}, {}, (), (alone, together), 0.0))
    assert [rank for rank, *_ in said] == [3, 4, 0, 0]
    assert said[1][1].startswith("Clients of all lanes that pool their observations got as much as if")
    assert "together receive the weights themselves" in said[1][3]


def test_a_sentence_has_value_interval_guessing_and_cases_before_the_rating():
    budget = {"members": 900, "non-members": 800}
    rate = Finding("LiRA", "anyone", "adaptive", "membership", "tpr at 0.1 % fpr", 0.007, 0.004, 0.012, 0.001, budget)
    assert sentence(rate) == (
        "Anyone who has the finished model found 0.7 % (0.4 to 1.2 %) of members at 0.1 % false alarms; guessing gives "
        "0.1 %. From 900 members and 800 others, by LiRA (adaptive): leaks."
    )
    told = Finding("forest", "client", "naive", "property", "auc", 0.7, 0.6, 0.8, 0.5, {"tested rounds": 40})
    assert (
        "told batches with and without the property “thick strokes” apart with AUC 0.700 (0.600 to 0.800)"
        in sentence(told, "thick strokes")
    )
    assert "told batches with and without a property apart" in sentence(told)


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
    added_by_the_audit = {"unprotected"}
    assert settings.asked >= {"veil", "sketch", "clients", "seed"}
    assert settings.asked - added_by_the_audit <= RunConfig().options().keys()
