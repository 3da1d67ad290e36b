"""The worker's half of definitions: what its driver has sent of them, and what it tells the driver of its own."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from colocate._definitions import ids
from colocate._definitions.bundles import ReceivedDefinitions, Table
from colocate._definitions.ids import Need
from colocate._definitions.sources import Refused, Source
from colocate._protocol import from_worker, questions, to_worker
from colocate._protocol.message import Message
from colocate.worker.birth.imports import DriversModules, imported_already, refuse_others


class Definitions:
    """What one worker and its driver know of each other's classes and functions."""

    def __init__(self, ask: Callable[..., Any], send: Callable[[Message, Any], None], in_process: bool) -> None:
        """Args: ask: Asks the driver something, and waits. send: Sends it a message. in_process: Nothing travels."""
        self._ask = ask
        self._send = send
        self._in_process = in_process
        self.received = ReceivedDefinitions(
            lambda ids, names: send(from_worker.Undefined(tuple(ids), tuple(names)), None)
        )
        self._driver = Table("runs it")
        self._lock = threading.Lock()
        self._early: dict[str, tuple[str, str]] = {}
        self._modules = DriversModules(self._ask_for_module)
        self._held: dict[int, Any] = {}  # what was made here; the driver may name it at any time
        self._told = self._heard = 0  # bundles that were sent to the driver, and how many of them it has for certain

    # -- from the driver

    def arrived(self, message: to_worker.Define, body: Any) -> None:
        """Take a bundle of the driver's. On the receiving thread, where nothing is loaded."""
        self.received.put(message.ids, message.names, body)
        self._driver.knows.update(message.ids)

    # -- modules

    def install(self) -> None:
        """Have imports of this process find the driver's modules, and definitions that only the driver has.

        On the receiving thread.
        """
        self._early = imported_already()
        self._modules.receiver = threading.get_ident()
        ids.find_missing = lambda id: self._ask(questions.Missing(id))  # what came from another worker
        sys.meta_path.insert(0, self._modules)

    def _ask_for_module(self, name: str) -> Mapping[str, Source | Refused]:
        found: Mapping[str, tuple[Any, ...]] = self._ask(questions.Source(name))
        return {name: Source(*told) if len(told) > 1 else Refused(*told) for name, told in found.items()}

    def compare_modules(self) -> None:
        """See that no module which was here before the driver's were is in the way of one of those.

        Raises:
            ColocateError: One is.
        """
        if not self._in_process:
            shadowing: dict[str, tuple[str, str]] = self._ask(questions.Compare(self._early))
            refuse_others(shadowing)
            self._modules.shadowing = frozenset(shadowing)

    # -- to the driver

    def tell(self, body: Any, wait: bool = False) -> None:
        """Have the driver know what is only named in a body, before that is sent.

        Args:
            body: The body.
            wait: It goes to another worker, which asks the driver: wait until that knows.

        Raises:
            SerializationError: A class that was made here can't be pickled.
        """
        if self._in_process:  # the body may be the value itself, whose attributes are its own
            return
        needs: Sequence[Need] = getattr(body, "needs", ())
        if not needs:
            return
        with self._lock:
            lacking = self._driver.lacks(needs)
            if lacking:
                bundle = self._driver.bundle(lacking)
                self._send(to_worker.Define(tuple(bundle.definitions), tuple(bundle.names)), bundle.body)
                self._driver.has_got(bundle)
                self._held.update(bundle.definitions)
                self._told += 1
            told = self._told
        if wait and self._heard < told:  # it may be on its way, whoever has sent it
            self._ask(questions.HeardAll())
            self._heard = max(self._heard, told)

    def renew(self) -> None:
        """Another driver follows, which has been told nothing and has a script of its own."""
        with self._lock:
            self._driver = Table("another")
        self._modules.forget()
