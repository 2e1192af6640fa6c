"""DoubleBlind with correlated noise of nodes, some of which are missing in some rounds."""

import math
from dataclasses import replace
from pathlib import Path

from flwr.app import ConfigRecord, Context, Message

from dbcl.flower import LocalGrid
from dbcl.flower.grid import FIRST_NODE
from flower.test_shared_noise import PLAN, grid_of, strategy_of


def test_a_node_that_is_missing_in_some_rounds_comes_back(tmp_path: Path) -> None:
    plan = replace(PLAN, fewest=4, colluders=0)
    grid, strategy = grid_of(plan, tmp_path), strategy_of(plan)
    process = grid.client_app

    def fragile(message: Message, context: Context) -> Message:
        record = message.content.get("dbcl")
        step = isinstance(record, ConfigRecord) and ("step" in record or "broadcast" in record)
        if step and strategy.server.round in (1, 2) and message.metadata.dst_node_id == FIRST_NODE + 2:
            raise RuntimeError("the node is gone")
        return process(message, context)

    assert isinstance(grid, LocalGrid)
    grid.client_app = fragile  # type: ignore[assignment]
    strategy.start(grid, num_rounds=4)
    assert [report.accepted for report in strategy.reports] == [5, 4, 4, 5]
    assert strategy._secure is not None
    attendance = strategy._secure.rounds.attendance
    assert attendance is not None
    rows = attendance.rows
    assert [len(names) for _, names in rows] == [5, 4, 4, 5]
    assert math.sqrt(4 / 5) * plan.mu < plan.spent_by(rows).mu <= plan.mu
