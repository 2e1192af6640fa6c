"""`dbcl privacy` with one example as the privacy unit: noise, rounds and expected accuracy of
planned settings.
"""

from typing import Any

from dbcl.cli.console import console, table
from dbcl.errors import GuaranteeError
from dbcl.privacy import PrivacyPlan
from dbcl.simulation import plots
from dbcl.simulation.build import privacy_plan
from dbcl.simulation.config import RunConfig
from dbcl.simulation.planning import Forecast, forecasts, noise_warning, planned

TRUST = {"clients": "nobody is trusted", "server": "the server is trusted"}
MEASURED = (
    "The loss is what a linear head on features of the digits lost at this noise (results/guaranteed/README.md); a "
    "task that needs longer training loses more: CIFAR-10 4 points at epsilon 3."
)


class ExamplePlan:
    """Planned example-level guarantee for several parties.

    Args:
        config: Settings whose privacy unit is one example.
        examples: Number of training examples of all parties.
        values: Number of trained parameters.

    >>> from dbcl.simulation import preset
    >>> ExamplePlan(preset("guaranteed"), examples=4000, values=39_700).facts()["rounds"]
    60
    """

    def __init__(self, config: RunConfig, *, examples: int, values: int) -> None:
        self.examples, self.values = examples, values
        self.rows = forecasts(config, examples=examples, values=values)
        self.config, self.problem = config, ""
        self.plan: PrivacyPlan | None = None
        try:
            self.config = planned(config, examples=examples, values=values)
            self.plan = privacy_plan(self.config, examples, values)
            self.problem = noise_warning(self.plan, values)
        except GuaranteeError as error:
            self.problem = str(error)

    @property
    def chosen(self) -> Forecast:
        """Forecast for the chosen target."""
        privacy = self.config.privacy
        assert privacy is not None
        return next(row for row in self.rows if (row.epsilon, row.noise_by) == (privacy.epsilon, privacy.noise_by))

    def facts(self) -> dict[str, Any]:
        """Return the plan as JSON values."""
        plan, config = self.plan, self.config
        assert config.privacy is not None
        known = {"unit": "example", "epsilon": config.privacy.epsilon, "delta": config.privacy.delta}
        known |= {"noise_by": config.privacy.noise_by, "parties": config.clients, "examples": self.examples}
        known |= {"parameters": self.values, "problem": self.problem, "useful": plan is not None}
        if plan is not None:
            known |= {"rounds": plan.rounds, "separation": plan.separation, "participations": plan.participations}
            known |= {"batch": plan.batch, "clip": config.privacy.clip, "lr": config.lr, "mu": plan.mu}
            known |= {"sigma": plan.sigma, "noise": plan.noise, "promise": plan.promise}
            known |= {"noise_to_signal": plan.noise_to_signal(self.values)}
        return {**known, "forecast": [row._asdict() for row in self.rows]}

    def show(self) -> None:
        """Print the plan, its guarantee, and alternative settings."""
        config, plan, row = self.config, self.plan, self.chosen
        privacy = config.privacy
        assert privacy is not None
        title = f"epsilon {privacy.epsilon:g} at delta {privacy.delta:g} for every example, {TRUST[privacy.noise_by]}"
        if plan is not None:
            each = self.examples // config.clients
            lines = [
                ("parties", f"{config.clients} with {each:,} examples each" + self._colluding(plan)),
                ("model", f"{config.model}, {self.values:,} trained parameters"),
                ("rounds", f"{plan.rounds}; {plan.batch:,} of {self.examples:,} examples in each"),
                ("turns of one example", f"{plan.participations} at most, {plan.separation} rounds apart or more"),
                ("clip", f"{privacy.clip:g} on each gradient, times the learning rate {config.lr:g}"),
                ("mu", f"{plan.mu:.4g}"),
                ("noise", f"{plan.noise_to_signal(self.values):.2g} times all that can be learned"),
                ("expected loss", f"about {row.loss:.1f} points of accuracy"),
            ]
            console.print(table(title, ("", ""), lines))
            console.print(f"the guarantee: {plan.promise}", highlight=False, markup=False)
        console.print(table("accuracy to expect", ("epsilon", *TRUST.values(), "rounds"), self._choices()))
        console.print(MEASURED, highlight=False)
        if self.problem:
            console.print(self.problem, style="yellow", highlight=False, markup=False)

    @staticmethod
    def _colluding(plan: PrivacyPlan) -> str:
        return f", of whom {plan.colluders} may collude with the server" if plan.shared else ""

    def _choices(self) -> list[tuple[str, ...]]:
        found = []
        for epsilon in sorted({row.epsilon for row in self.rows}):
            of = {row.noise_by: row for row in self.rows if row.epsilon == epsilon}
            cells = [f"{of[by].loss:.1f} points less" if by in of else "2 parties or more" for by in TRUST]
            rounds = " or ".join(dict.fromkeys(str(row.rounds) for row in of.values()))
            found.append((f"{epsilon:g}", *cells, rounds))
        return found

    def picture(self) -> bytes:
        """Plot the expected loss of accuracy against epsilon as a PNG."""
        losses = {
            words: {row.epsilon: row.loss for row in self.rows if row.noise_by == by}
            for by, words in TRUST.items()
            if any(row.noise_by == by for row in self.rows)
        }
        title = f"{self.config.clients} parties, {self.examples:,} examples, {self.values:,} parameters"
        return plots.loss_by_epsilon(losses, self.chosen.epsilon, title)
