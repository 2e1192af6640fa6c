"""An in-process grid, and a grid wrapper that limits the time spent waiting for nodes."""

import copy
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any
from uuid import uuid4

from flwr.app import Context, Error, Message, RecordDict, UserConfig
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid

from dbcl.errors import ConfigError, ProtocolError

log = logging.getLogger("flwr.dbcl")

FIRST_NODE = 1000  # any number but 1, which Flower gives to the server
TELL_EVERY = 10.0
"""Seconds between log messages while a server waits for nodes."""
REMEDY = "min_available_nodes and min_train_nodes say how many"
SECURE_REMEDY = "SecAggConfig(min_cohort=...) says how many in each lane, and SketchConfig(lanes=1) needs the fewest"
GUARANTEE_REMEDY = "PrivacyPlan(clients=..., cohort=...) says how many, and how many rounds a node pauses in between"


class LocalGrid(Grid):
    """A grid whose nodes run a `ClientApp` in this process, without Ray or network ports.

    Each node has a context with `partition-id` and `num-partitions`, as in Flower's simulation. If
    a client raises an exception, the grid returns Flower's error reply. Clients run sequentially.
    With a timeout, each client gets an equal share of the remaining time; a slower client continues
    in the background.

    Args:
        client_app: App of the nodes.
        nodes: Number of nodes.
        node_config: Additional entries of each node's configuration.
        run_config: Configuration of the run.
        hook: Function called with every message, in both directions, before its delivery.

    >>> from flwr.app import RecordDict
    >>> app = ClientApp()
    >>> @app.query()
    ... def answer(message, context):
    ...     return Message(RecordDict(), reply_to=message)
    >>> grid = LocalGrid(app, nodes=2)
    >>> questions = [Message(RecordDict(), node, "query") for node in grid.get_node_ids()]
    >>> [reply.has_error() for reply in grid.send_and_receive(questions)]
    [False, False]
    """

    def __init__(
        self,
        client_app: ClientApp,
        nodes: int,
        *,
        run_config: UserConfig | None = None,
        node_config: UserConfig | None = None,
        hook: Callable[[Message], None] | None = None,
    ) -> None:
        if nodes < 1:
            raise ConfigError(f"a grid needs one node or more, got {nodes}")
        self.client_app, self.hook = client_app, hook
        self._run: Any = None
        self._replies: dict[str, Message] = {}
        _set_identity()
        self.contexts = {
            FIRST_NODE + number: Context(
                run_id=0,
                node_id=FIRST_NODE + number,
                node_config={**(node_config or {}), "partition-id": number, "num-partitions": nodes},
                state=RecordDict(),
                run_config=dict(run_config or {}),
            )
            for number in range(nodes)
        }

    def set_run(self, run: Any) -> None:
        """Store Flower's description of the run."""
        self._run = run

    @property
    def run(self) -> Any:
        """Flower's description of the run, stored by `set_run`."""
        return self._run

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        """Create a message. Flower recommends the `Message` constructor instead."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> list[int]:
        """Return the ids of the connected nodes."""
        return list(self.contexts)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Deliver messages and store the replies for `pull_messages`."""
        sent = [self._stamp(message) for message in messages]
        for message in sent:
            self._replies[message.metadata.message_id] = self._answer(message)
        return [message.metadata.message_id for message in sent]

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Return new replies. Each reply is returned only once."""
        return [self._replies.pop(key) for key in list(message_ids) if key in self._replies]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        """Deliver messages and return the replies in the order of the messages.

        Replies after the timeout are omitted.
        """
        if timeout is None:
            return self.pull_messages(self.push_messages(messages))
        sent = [self._stamp(message) for message in messages]
        deadline = time.monotonic() + timeout
        answers: dict[int, Message] = {}
        threads = []
        for number, message in enumerate(sent):

            def turn(number: int = number, message: Message = message) -> None:
                answers[number] = self._answer(message)

            threads.append(threading.Thread(target=turn, daemon=True))
            threads[-1].start()
            threads[-1].join(max(0.0, deadline - time.monotonic()) / (len(sent) - number))
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        in_time = dict(answers)
        return [in_time[number] for number in sorted(in_time)]

    def _stamp(self, message: Message) -> Message:
        message.metadata.__dict__["_message_id"] = str(uuid4())  # as Flower's own grids do
        return message

    def _answer(self, message: Message) -> Message:
        # Copies, as a wire makes them: neither side may reach into the other's records.
        message = copy.deepcopy(message)
        if self.hook is not None:
            self.hook(message)
        try:
            context = self.contexts.get(message.metadata.dst_node_id)
            if context is None:
                raise ProtocolError(f"no node {message.metadata.dst_node_id} in this grid")
            reply = copy.deepcopy(self.client_app(message, context))
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            reply = Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason), reply_to=message)
        if self.hook is not None:
            self.hook(reply)
        return reply


class TimeoutGrid(Grid):
    """A grid wrapper that limits how long a strategy waits for enough nodes.

    If fewer than `fewest` nodes may take part, the wrapper logs the required nodes immediately and
    then every ten seconds. On a `LocalGrid`, whose set of nodes is fixed, too few nodes raise an
    error immediately.

    Args:
        grid: The wrapped grid.
        timeout: Maximum waiting time, in seconds.
        needed: Returns a description of the required nodes, for the error message.
        allowed: Selects and orders the nodes that may take part. The wrapper hides all other nodes.
        fewest: Number of nodes for which the strategy waits, at least 1.
        remedy: Returns the names of the settings that determine the required number of nodes, for
            the error message.

    >>> grid = TimeoutGrid(LocalGrid(ClientApp(), nodes=2), timeout=600, needed=lambda: "3", fewest=3)
    >>> grid.get_node_ids()
    Traceback (most recent call last):
        ...
    dbcl.errors.ProtocolError: too few nodes: 2 are there; needed: 3. A LocalGrid gets no others: give it ...
    """

    def __init__(
        self,
        grid: Grid,
        timeout: float,
        needed: Callable[[], str],
        allowed: Callable[[list[int]], list[int]] | None = None,
        *,
        fewest: int = 1,
        remedy: str = REMEDY,
    ) -> None:
        self.grid, self.timeout, self.needed, self.allowed = grid, timeout, needed, allowed
        self.fewest, self.remedy = max(1, fewest), remedy
        self._deadline: float | None = None
        self._told = -math.inf

    def set_run(self, run: Any) -> None:
        self.grid.set_run(run)

    @property
    def run(self) -> Any:
        return self.grid.run

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        return self.grid.create_message(content, message_type, dst_node_id, group_id, ttl)

    def get_node_ids(self) -> list[int]:
        """Return the nodes that may take part, always in the same order.

        Raises:
            ProtocolError: The timeout has passed, or a grid with a fixed set of nodes has too few.
        """
        there = sorted(self.grid.get_node_ids())
        nodes = there if self.allowed is None else self.allowed(there)
        now = time.monotonic()
        if self._deadline is None:
            self._deadline = now + self.timeout
        short = len(nodes) < self.fewest
        if short and _is_fixed(self.grid):
            raise ProtocolError(
                f"too few nodes: {len(there)} are there{self._counted(nodes)}. A LocalGrid gets no others: give it "
                f"more nodes, or let the run need fewer; {self.remedy}"
            )
        if now > self._deadline:
            raise ProtocolError(
                f"waited {self.timeout:g} s for nodes: {len(there)} are there{self._counted(nodes)}. Start them and "
                f"run the same command again; {self.remedy}"
            )
        if short and now > self._told + TELL_EVERY:
            self._told = now
            log.info("waiting for nodes: %s are there%s", len(there), self._counted(nodes))
        return nodes

    def _counted(self, nodes: list[int]) -> str:
        may = "" if self.allowed is None else f", {len(nodes)} of them may take part in this round"
        return f"{may}; needed: {self.needed().rstrip(',')}"

    def settle(self) -> list[int]:
        """Wait until enough nodes may take part, then fix the set of visible nodes."""
        while not (nodes := self.get_node_ids()):
            time.sleep(0.2)
        self.allowed = lambda there: nodes
        return nodes

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        return self.grid.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return self.grid.pull_messages(message_ids)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        return self.grid.send_and_receive(messages, timeout=self.timeout if timeout is None else timeout)


def _is_fixed(grid: Grid) -> bool:
    """Return True for a `LocalGrid`, unless a subclass overrides the list of nodes."""
    own = getattr(grid.get_node_ids, "__func__", None)
    return own is LocalGrid.get_node_ids


def _set_identity() -> None:
    """Set Flower's process identity if unset.

    Recent versions cannot create a message without it.
    """
    try:
        from flwr.supercore.task_identity import TaskIdentity
    except ImportError:
        return
    for name, number in (("run_id", 0), ("node_id", 1), ("task_id", 1)):
        try:
            getattr(TaskIdentity, name)
        except RuntimeError:
            setattr(TaskIdentity, name, number)
