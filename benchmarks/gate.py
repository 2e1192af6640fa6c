"""Compare a fresh run of the benchmarks with the recorded one: no ratio may fall behind by more than the noise.

    python benchmarks/gate.py FRESH_FOLDER

A ratio's noise is the spread that both runs state, three of them, and 5 % besides. Exit status 1 where one fell behind.
"""

import json
import sys
from pathlib import Path

RECORDED = Path(__file__).parent / "results"


def rows(node: dict, path: str = "") -> dict[str, dict]:
    """All rows of a result that have a ratio, by their path."""
    if "ratio" in node:
        return {path: node}
    found = {}
    for name, child in node.items():
        if isinstance(child, dict):
            found |= rows(child, f"{path} / {name}" if path else name)
    return found


def behind(recorded: dict, fresh: dict, ours: tuple[str, ...]) -> list[str]:
    """The sides of ours that are slower, relative to the rest, than they were."""
    complaints = []
    new = rows(fresh["results"])
    for path, old in rows(recorded["results"]).items():
        if path not in new or not path.endswith(ours):
            continue
        allowed = old["ratio"] * 1.05 + 3 * (old["spread"] + new[path]["spread"])
        if new[path]["ratio"] > allowed:
            complaints.append(f"{path}: ratio {new[path]['ratio']} against {old['ratio']}, allowed {allowed:.3f}")
    return complaints


def main() -> None:
    folder = Path(sys.argv[1])
    complaints = []
    # In `rounds` the ratios are to our own engine, so there it is the others that must not seem faster: turn them over.
    for name, ours in (("layers", "/ ours"), ("small", "/ ours"), ("flower", "local grid")):
        recorded, fresh = (json.loads((place / f"{name}.json").read_text()) for place in (RECORDED, folder))
        complaints += behind(recorded, fresh, (ours,))
    old, new = (json.loads((place / "rounds.json").read_text())["results"] for place in (RECORDED, folder))
    for network, table in old.items():
        for side in ("plain loop", "authors' layers"):
            was, now = table[side], new[network][side]
            if now["ratio"] < was["ratio"] / 1.05 - 3 * (was["spread"] + now["spread"]):
                complaints.append(f"{network} / {side}: stacked was {was['ratio']} times it and is {now['ratio']}")
    print("\n".join(complaints) or "no ratio fell behind")
    sys.exit(bool(complaints))


if __name__ == "__main__":
    main()
