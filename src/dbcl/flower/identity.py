"""Node identities derived from a signing key on the node's disk, independent of Flower's node ids.

A SuperNode without authentication keys gets a new id at every start. Participation records and
secure aggregation groups must outlive such a restart. When node identities matter, the server
therefore asks each new node for its public key (`NodeNames`). The node replies with a signed nonce
(`introduction`).
"""

import contextlib
import json
import logging
import math
import secrets
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.serverapp import Grid

from dbcl.errors import ConfigError, ProtocolError, plain
from dbcl.files import SECRET, locked, make_folder, user_path, write_atomic
from dbcl.flower.records import RECORD, message_bytes, node_name
from dbcl.privacy import PrivacyPlan
from dbcl.protocol.secagg.keys import KEY, SIGNATURE, Registry, SigningKey, digest
from dbcl.state import State

log = logging.getLogger("flwr.dbcl")

HELLO = "hello"
"""Record name: holds a nonce in the request, and the public key and signature in the reply."""
NONCE = 32
"""Length of a nonce in bytes."""
IN_MEMORY, ON_DISK = b"in memory", b"on disk"
"""Statements by which a node without a privacy plan reports where its key is stored."""
ASK_AGAIN = 5.0
"""Seconds before the server asks a node again for a missing key."""


def key_name(public: bytes) -> str:
    """Return a node's name: 80 bits of the digest of its public key.

    >>> key_name(bytes(32))
    'node fd17 23a5 a934 118e 5e6d'
    """
    text = digest(b"node name", public).hex()[:20]
    return "node " + " ".join(text[start : start + 4] for start in range(0, 20, 4))


@dataclass(frozen=True)
class KeyRegistry(Registry):
    """Accepts clients whose names match their public keys.

    Args:
        keys: The accepted public keys; None accepts every key.

    >>> alice = SigningKey(bytes(32))
    >>> KeyRegistry().problem(key_name(alice.public), alice.public)
    >>> KeyRegistry().problem("alice", alice.public)
    "'alice' is not the name of its key"
    >>> KeyRegistry(keys=frozenset([bytes(32)])).problem(key_name(alice.public), alice.public)
    'its key is not registered'
    """

    keys: frozenset[bytes] | None = None

    def problem(self, name: str, public: bytes) -> str | None:
        """Return the reason to reject a client's identity, or None if it is valid."""
        if name != key_name(public):
            return f"{plain(name)!r} is not the name of its key"
        return None if self.keys is None or public in self.keys else "its key is not registered"

    @classmethod
    def read(cls, path: str | Path) -> "KeyRegistry":
        """Read a file with one hexadecimal public key per line.

        Each line has the format of a node's `public-key` file.

        Args:
            path: The file.

        Returns:
            A registry that accepts only these keys.

        Raises:
            ConfigError: The file does not hold valid keys.

        >>> import tempfile
        >>> file = Path(tempfile.mkdtemp(), "keys.txt")
        >>> _ = file.write_text("00" * 32 + "\\n")
        >>> len(KeyRegistry.read(file).keys)
        1
        """
        lines = user_path(path).read_text().split()
        try:
            keys = frozenset(map(bytes.fromhex, lines))
        except ValueError:
            keys = frozenset([b""])
        if not keys or any(len(key) != KEY for key in keys):
            raise ConfigError(f"{path} must hold public keys of {KEY} bytes in hexadecimal, one on each line")
        return cls(keys=keys)


# On the node


class NodeStore:
    """Persistent storage of a node: files in a folder or, without a folder, `context.state`."""

    def __init__(self, folder: Path | None, context: Context | None) -> None:
        self._folder, self._context = folder, context

    @property
    def lasting(self) -> bool:
        """Return True if the stored state survives a restart of the node's process."""
        return self._folder is not None

    def read(self, name: str) -> bytes | None:
        """Return the bytes stored under a name, or None."""
        if self._folder is not None:
            path = self._folder / f"{name}.dbcl"
            return path.read_bytes() if path.exists() else None
        assert self._context is not None
        record = self._context.state.get(f"dbcl-{name}")
        data = record.get("state") if isinstance(record, ConfigRecord) else None
        return data if isinstance(data, bytes) else None

    def write(self, name: str, data: bytes) -> None:
        """Store bytes under a name, readable only by this node."""
        if self._folder is not None:
            write_atomic(self._folder / f"{name}.dbcl", data, mode=SECRET)
        else:
            assert self._context is not None
            self._context.state[f"dbcl-{name}"] = ConfigRecord({"state": data})

    def identity(self) -> SigningKey:
        """Return the node's signing key; create it at first use.

        In a folder, the file `public-key` holds the public key for other parties.
        """
        secret = self.read("key")
        identity = SigningKey(secret) if secret is None or len(secret) == KEY else None
        if identity is None:
            raise ConfigError("the node's key cannot be read; restore key.dbcl, or begin a new run with a new folder")
        if secret is None:
            self.write("key", identity.secret)
        if self._folder is not None and not (self._folder / "public-key").exists():
            write_atomic(self._folder / "public-key", identity.public.hex().encode())
        return identity


def make_key(folder: str | Path) -> str:
    """Return a node's public key in hexadecimal; create the key pair at first use.

    Write the keys of all nodes to a file, one per line, for `KeyRegistry.read`.

    Args:
        folder: The node's folder.

    Returns:
        The public key in hexadecimal.

    >>> import tempfile
    >>> folder = tempfile.mkdtemp()
    >>> len(make_key(folder)), make_key(folder) == make_key(folder)
    (64, True)
    """
    place = user_path(folder)
    make_folder(place, secret=True)
    with locked(place):
        return NodeStore(place, None).identity().public.hex()


@contextlib.contextmanager
def node_store(folder: str | Path | None, context: Context) -> Iterator[NodeStore]:
    """Open the storage of a node. A folder rejects a second concurrent message.

    Nodes with a `partition-id` may share a disk, as in a simulation: each uses a separate subfolder
    of `folder`.
    """
    if folder is None:
        yield NodeStore(None, context)
        return
    place = user_path(folder)
    partition = context.node_config.get("partition-id")
    if partition is not None:
        place /= f"partition-{int(partition)}"
    make_folder(place, secret=True)
    with locked(place):
        yield NodeStore(place, context)


def introduction(store: NodeStore, message: Message, privacy: PrivacyPlan | None = None) -> Message | None:
    """Return a node's reply to a request for its public key, or None for any other message.

    With a plan, the node also states that it limits its own participation to this plan.
    """
    nonce = message_bytes(message, HELLO)
    if nonce is None:
        return None
    identity, kept = store.identity(), IN_MEMORY
    if store.lasting:
        kept = ON_DISK if privacy is None else _counted(privacy)
    answer = identity.public + identity.sign(*_hello(nonce, kept)) + kept
    return Message(RecordDict({RECORD: ConfigRecord({HELLO: answer})}), reply_to=message)


def _hello(nonce: bytes, kept: bytes) -> tuple[bytes, ...]:
    """Return the bytes that a node signs: the nonce and where its key is stored."""
    return b"hello", nonce, kept


def _counted(privacy: PrivacyPlan) -> bytes:
    """Return a node's statement that it stores its key and records its participation in a plan."""
    return b"counts " + digest(b"guarantee", json.dumps(asdict(privacy), sort_keys=True).encode())


# On the server


class NodeNames:
    """Names of the nodes on the server, derived from their keys if `by_key`, else from Flower ids.

    Under a guarantee, only nodes that store their key on disk and record their participation get a
    name. Without a stored key, a node would get a new name and an empty participation record at
    every start.

    >>> names = NodeNames(by_key=True)
    >>> names.load_state(State({"nodes": {"7": "node ab"}}, {}))
    >>> names.of(7), names.of(8), NodeNames(by_key=False).of(8)
    ('node ab', None, 'node 8')
    """

    def __init__(self, *, by_key: bool, privacy: PrivacyPlan | None = None) -> None:
        self.by_key, self.privacy = by_key, privacy
        self._names: dict[int, str] = {}
        self._failed: dict[int, float] = {}  # of nodes that showed no key: when they were asked

    def of(self, node: int) -> str | None:
        """Return the name of a node, or None if the server does not know its key."""
        return self._names.get(node) if self.by_key else node_name(node)

    def present(self, nodes: Iterable[int], grid: Grid, timeout: float) -> dict[str, int]:
        """Return the present nodes by name, after asking new nodes for their keys.

        A restarted node has two ids until Flower notices the restart. The later id is used.
        """
        there = sorted(nodes)
        if self.by_key:
            self._learn(there, grid, timeout)
        return {name: node for node in there if (name := self.of(node)) is not None}

    def _learn(self, nodes: list[int], grid: Grid, timeout: float) -> None:
        nonces = {
            node: secrets.token_bytes(NONCE)
            for node in nodes
            if node not in self._names and time.monotonic() > self._failed.get(node, -math.inf) + ASK_AGAIN
        }
        messages = [
            Message(RecordDict({RECORD: ConfigRecord({HELLO: nonce})}), node, "train", ttl=timeout)
            for node, nonce in nonces.items()
        ]
        for reply in grid.send_and_receive(messages, timeout=timeout) if messages else ():
            node = reply.metadata.src_node_id
            if node not in nonces:
                continue
            try:
                self._names[node] = _signed_name(reply, nonces[node], self.privacy)
            except ProtocolError as error:
                log.warning("node %s takes no part: %s", node, error)
                self._failed[node] = time.monotonic()
        if self._failed and not self._names:
            raise ProtocolError(
                f"none of {len(self._failed)} nodes shows a key, so none could take part; the app needs a mod: "
                "ClientApp(mods=[dbcl.flower.SecureMod(config)]) under secure aggregation, GuaranteeMod(plan, folder) "
                "with a guarantee, and SecureMod(config, folder, privacy=plan) with both"
            )

    def state(self) -> State:
        """Return the state for a checkpoint."""
        return State({"nodes": {str(node): name for node, name in self._names.items()}}, {})

    def load_state(self, state: State) -> None:
        """Restore the state returned by `state`."""
        self._names = {int(node): str(name) for node, name in state.values["nodes"].items()}


def _signed_name(reply: Message, nonce: bytes, privacy: PrivacyPlan | None) -> str:
    if reply.has_error():
        raise ProtocolError(
            f"it does not show a key: {plain(str(reply.error.reason or 'it failed without a reason'), 300)}"
        )
    answer, end = message_bytes(reply, HELLO) or b"", KEY + SIGNATURE
    public, signature, kept = answer[:KEY], answer[KEY:end], answer[end:]
    if len(signature) != SIGNATURE or not SigningKey.signed_by(public, signature, *_hello(nonce, kept)):
        raise ProtocolError("its answer is not signed with its key")
    if privacy is not None and kept != _counted(privacy):
        reasons = {
            IN_MEMORY: "its key ends with its process, and a guarantee counts nodes by key: give its mod a folder",
            ON_DISK: "it does not count its own participations: give its mod the plan of the guarantee",
        }
        raise ProtocolError(reasons.get(kept, "it counts its participations by another plan than the server's"))
    return key_name(public)
