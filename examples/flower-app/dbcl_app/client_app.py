"""What runs on a node: two lines of dbcl around a plain training loop."""

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

import dbcl.flower
from dbcl_app.task import load_part, net, train

app = ClientApp()


@app.train()
def fit(message: Message, context: Context) -> Message:
    """Train what the server sent on this node's examples, and answer with the change."""
    node, config = context.node_config, context.run_config
    x, y = load_part(str(config["data"]), int(node["partition-id"]), int(node["num-partitions"]))
    model = dbcl.flower.blinded(net(), message)
    loss = train(
        model, x, y, epochs=int(config["epochs"]), batch_size=int(config["batch-size"]), lr=float(config["lr"])
    )
    return dbcl.flower.reply(model, message, examples=len(y), metrics={"loss": loss})
