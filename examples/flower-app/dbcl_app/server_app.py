"""What runs on the server: Flower's own FedAvg inside dbcl's wrapper."""

import contextlib
import json
import logging
from pathlib import Path
from typing import Any

import safetensors.torch
from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

import dbcl.flower
from dbcl.files import write_atomic
from dbcl_app.guarantee import PRESET, features, head, plan_of
from dbcl_app.task import load_test, measure, net

app = ServerApp()
log = logging.getLogger("flwr")  # its lines are those of `flwr log`


def write_metrics(path: Path, line: dict[str, float]) -> None:
    """Write the line of a round after those before it; a run that was stopped within a round measures it again."""
    earlier: dict[float, dict[str, float]] = {}
    for text in path.read_text().splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError, TypeError, KeyError):  # half a line, from when the app was stopped
            read = json.loads(text)
            earlier[read["round"]] = read
    kept = [each for number, each in earlier.items() if number < line["round"]]
    write_atomic(path, "".join(json.dumps(each) + "\n" for each in [*kept, line]).encode())


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Play the rounds, or those that are left, and keep the model."""
    config = context.run_config
    data, nodes, rounds = str(config["data"]), int(config["min-nodes"]), int(config["rounds"])
    x, y = load_test(data)
    make, more = net, dict[str, Any]()
    if config["preset"] == PRESET:  # the nodes make the same plan by themselves, or take no part
        more |= {"privacy": plan_of(data, nodes, rounds), "ema_decay": 0.95}
        make, x = head, features(data, x, y).inputs
    else:
        more["sketch"] = dbcl.SketchConfig(ratio=float(config["ratio"]), veil=float(config["veil"]))
    folder = Path(str(config["checkpoint"])).expanduser().absolute() if config["checkpoint"] else None
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)

    def evaluate(number: int, arrays: ArrayRecord) -> MetricRecord:
        """Measure the running mean of W, which only the server can."""
        model = make()
        model.load_state_dict(arrays.to_torch_state_dict())
        loss, accuracy = measure(model, x, y)
        if folder is not None:
            write_metrics(folder / "metrics.jsonl", {"round": number, "accuracy": accuracy, "loss": loss})
        return MetricRecord({"accuracy": accuracy, "loss": loss})

    seed = None if config["insecure-seed"] == "" else int(config["insecure-seed"])
    with dbcl.flower.secret_weights(seed):  # who knows where a run begins works out more of the updates
        model = make()
    strategy = dbcl.flower.DoubleBlind(  # Only the server can measure the model, so no client is asked to evaluate.
        FedAvg(fraction_evaluate=0.0, min_train_nodes=nodes, min_available_nodes=nodes),
        model,
        **more,
        insecure_seed=seed,
        checkpoint=folder,
        round_timeout=float(config["round-timeout"]),
    )
    result = strategy.start(grid=grid, num_rounds=rounds, evaluate_fn=evaluate)
    if folder is not None:
        weights = safetensors.torch.save(result.arrays.to_torch_state_dict())
        write_atomic(folder / "model.safetensors", weights, mode=0o600)
        log.info("the model is in %s", folder / "model.safetensors")
