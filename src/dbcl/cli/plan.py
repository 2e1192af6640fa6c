"""`dbcl plan`: sketch plan of a model."""

from typing import Annotated, Any

import typer

from dbcl.cli.console import AsJson, console, print_json, table
from dbcl.cli.options import Examples, ExampleShape, Outputs, preset_option, read_shape, with_settings
from dbcl.config import SketchConfig
from dbcl.model import networks
from dbcl.plan import SketchPlan
from dbcl.simulation import message_bytes, presets
from dbcl.simulation.build import build_plan, validator
from dbcl.simulation.features import input_shape
from dbcl.simulation.planning import parameter_count, planned
from dbcl.simulation.privacy_budget import units_in

DEFAULT = "blind"
"""Default preset of the command, which enables sketching. Presets with a guarantee send every value
with noise.
"""


@with_settings("coverage", "sketch", "ratio", "lanes", "buckets", "veil", "wire")
def plan(
    model: Annotated[str, typer.Argument(show_default=False)],
    preset: Annotated[str | None, preset_option(DEFAULT)] = None,
    shape: ExampleShape = "1,28,28",
    outputs: Outputs = 10,
    *,
    examples: Examples = 0,
    as_json: AsJson = False,
    **settings: Any,
) -> None:
    """Show what a client would see of each tensor, which tensors are unprotected, and the bytes of a round.

    MODEL is a network's name, or module:factory of your own, as for `dbcl train --model`.

    Examples:

      dbcl plan mnist-mlp
      dbcl plan cifar-cnn --shape 3,32,32 --coverage all
      dbcl plan mypackage.nets:make --preset paper --json
    """
    chosen = presets.preset(DEFAULT if preset is None else preset, **settings)
    net = networks.build(model, shape=input_shape(model, read_shape(shape)), outputs=outputs)
    examples = examples or units_in(chosen)
    if chosen.privacy is not None:
        chosen = planned(chosen, examples=examples, values=parameter_count(net))
    made = build_plan(chosen, net, examples=examples)
    clear = message_bytes(net, SketchPlan.from_model(net, SketchConfig(sketch="identity-v1", veil=0)), "float32")
    size = message_bytes(net, made, chosen.wire)
    if as_json:
        rows = [dict(zip(made.header(), row, strict=True)) for row in made.rows()]
        facts = {"model": model, "tensors": rows, "unprotected": list(made.unprotected), "lanes": made.lanes}
        print_json({**facts, "message_bytes": size, "plain_message_bytes": clear, "wire": chosen.wire})
        return
    console.print(table(f"what a client of {model} sees", made.header(), made.rows()))
    console.print(f"unprotected: {', '.join(made.unprotected) or 'nothing'}")
    if chosen.privacy is not None and made.unprotected:
        console.print("all of it carries the noise of the guarantee, which is in the weights themselves")
    for note in made.notes():
        console.print(note, highlight=False)
    console.print(f"the validator: {validator(chosen)}", highlight=False)
    console.print(f"one message, each way and client: {size:,} bytes, {size / clear:.3f} of a plain one in float32")
    if any(tensor.sketched and not tensor.veil for tensor in made.tensors):
        console.print("[yellow]no veil: a client that remembers can undo the sketch (docs/threat-model.md)")
