"""What runs on a node: two lines of dbcl around a plain training loop, or with a guarantee one line in all."""

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

import dbcl.flower
from dbcl_app.guarantee import CLIP, data_of_node, features, guarantee, head, insists, plan_of_node
from dbcl_app.task import load_part, net, train

app = ClientApp(mods=[guarantee])


@app.train()
def fit(message: Message, context: Context) -> Message:
    """Train what the server sent on this node's examples, and answer with the change."""
    node, config = context.node_config, context.run_config
    name = data_of_node(node) if insists(node) else str(config["data"])
    x, y = load_part(name, int(node["partition-id"]), int(node["num-partitions"]))
    if insists(node):
        own = features(name, x, y, cache=f"{node['secrets']}/partition-{node['partition-id']}/features")
        return dbcl.flower.clipped_reply(head(), message, own, privacy=plan_of_node(node), clip=CLIP)
    model = dbcl.flower.blinded(net(), message)
    loss = train(
        model, x, y, epochs=int(config["epochs"]), batch_size=int(config["batch-size"]), lr=float(config["lr"])
    )
    return dbcl.flower.reply(model, message, examples=len(y), metrics={"loss": loss})
