"""A client's side of a round as plain values, for a client that is another process at every message.

What is written after a step says that it is taken, so whoever reads it takes the next one. A round is never played
twice from one state: that is for whoever keeps it to see to, and a broadcast always begins with new keys.
"""

from typing import Any

import numpy as np
import torch

from dbcl.errors import ProtocolError
from dbcl.protocol.secagg.client import STEPS, ClientRound
from dbcl.protocol.secagg.keys import Identity, KeyPair, Registry
from dbcl.protocol.secagg.messages import Message, Roster, Survivors, decode_message, encode_message
from dbcl.protocol.secagg.terms import Terms
from dbcl.state import State


def round_state(own: ClientRound) -> State:
    """What a client must keep of its round, its secrets too. How it rounds is not in it: by a generator of its own.

    >>> own = ClientRound("ann", Identity(bytes(32)), 3, bytes(32), bytes(32), Terms(bound=4.0))
    >>> advert = own.advertise()
    >>> again = resumed_round(round_state(own), Identity(bytes(32)), Terms(bound=4.0), None)
    >>> again.next_step
    'share'
    """
    values: dict[str, Any] = {
        "name": own.name,
        "round": own.round,
        "broadcast": own.broadcast.hex(),
        "plan": own.plan.hex(),
        "step": own._step,
        "seeds": [own._share_keys.seed.hex(), own._mask_keys.seed.hex(), own._own_mask.hex()],
        "held": {name: pair.hex() for name, pair in own._held.items()},
        "sharers": list(own._sharers),
    }
    seen: dict[str, Message | None] = {"roster": own._roster, "survivors": own._survivors}
    tensors = {
        name: torch.from_numpy(np.frombuffer(encode_message(each), dtype=np.uint8).copy())
        for name, each in seen.items()
        if each is not None
    }
    return State(values, tensors)


def resumed_round(state: State, identity: Identity, terms: Terms, registry: Registry | None) -> ClientRound:
    """The round that `round_state` gave, for its next step."""
    values, tensors = state
    try:
        share_seed, mask_seed, own_mask = (bytes.fromhex(seed) for seed in values["seeds"])
        digests = bytes.fromhex(values["broadcast"]), bytes.fromhex(values["plan"])
        own = ClientRound(values["name"], identity, values["round"], *digests, terms, registry)
        own._step = STEPS.index(STEPS[values["step"]])
        own._share_keys, own._mask_keys, own._own_mask = KeyPair(share_seed), KeyPair(mask_seed), own_mask
        own._held = {name: bytes.fromhex(pair) for name, pair in values["held"].items()}
        own._sharers = tuple(values["sharers"])
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise ProtocolError(f"the state of a client in a round cannot be read ({type(error).__name__})") from error
    if "roster" in tensors:
        own._roster = decode_message(Roster, tensors["roster"].numpy().tobytes())
        for member in own._roster.members:
            if member.name != own.name:
                keys = own._share_keys.agree(member.share_key), own._mask_keys.agree(member.mask_key)
                own._secrets[member.name] = keys
    if "survivors" in tensors:
        own._survivors = decode_message(Survivors, tensors["survivors"].numpy().tobytes())
    return own
