"""Exchanges definitions of classes and functions with the driver: the worker's half."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from colocate._definitions import ids
from colocate._definitions.bundles import ReceivedDefinitions, Table
from colocate._definitions.ids import Need
from colocate._definitions.sources import RefusedModule, Source
from colocate._protocol import from_worker, questions, to_worker
from colocate._protocol.message import Message
from colocate.worker.birth.imports import DriverModuleFinder, check_shadowing, list_early_imports


class Definitions:
    """Tracks which classes and functions the worker and the driver have sent each other."""

    def __init__(self, ask: Callable[..., Any], send: Callable[[Message, Any], None], in_process: bool) -> None:
        """Args: ask: Asks the driver, and waits. send: Sends it a message. in_process: If true, nothing is sent."""
        self._ask = ask
        self._send = send
        self._in_process = in_process
        self.received = ReceivedDefinitions(
            lambda ids, names: send(from_worker.BundleFailed(tuple(ids), tuple(names)), None)
        )
        self._driver = Table("runs it")
        self._lock = threading.Lock()
        self._early: dict[str, tuple[str, str]] = {}
        self._modules = DriverModuleFinder(self._ask_for_module)
        # Definitions made here stay alive, because the driver may use their names at any time.
        self._held: dict[int, Any] = {}
        # Number of bundles of definitions sent to the driver, and number of bundles that the driver has confirmed.
        self._sent_count = self._confirmed_count = 0

    # -- from the driver

    def on_bundle(self, message: to_worker.Define, body: Any) -> None:
        """Store a bundle of definitions from the driver. None is loaded, because this runs on the receiving thread."""
        self.received.add_bundle(message.ids, message.names, body)
        self._driver.sent_ids.update(message.ids)

    # -- modules

    def install(self) -> None:
        """Install import hooks for the driver's modules, and for definitions that only the driver has.

        Must run on the receiving thread.
        """
        self._early = list_early_imports()
        self._modules.receiver = threading.get_ident()
        # The driver is asked for definitions that came from another worker.
        ids.find_missing = lambda id: self._ask(questions.MissingParts(id))
        sys.meta_path.insert(0, self._modules)

    def _ask_for_module(self, name: str) -> Mapping[str, Source | RefusedModule]:
        answer: Mapping[str, tuple[Any, ...]] = self._ask(questions.Source(name))
        return {name: Source(*fields) if len(fields) > 1 else RefusedModule(*fields) for name, fields in answer.items()}

    def compare_modules(self) -> None:
        """Check that no module imported earlier shadows a module of the driver.

        Raises:
            ColocateError: A module shadows a module of the driver.
        """
        if not self._in_process:
            shadowing: dict[str, tuple[str, str]] = self._ask(questions.Compare(self._early))
            check_shadowing(shadowing)
            self._modules.shadowing = frozenset(shadowing)

    # -- to the driver

    def send_lacking(self, body: Any, wait: bool = False) -> None:
        """Send the driver the definitions that a message body only names, before the body itself is sent.

        Args:
            body: The body.
            wait: Whether to wait until the driver has the definitions, because another worker gets the body and asks
                the driver.

        Raises:
            SerializationError: A class that was made here can't be pickled.
        """
        if self._in_process:  # The body may be a user's value, so its attribute `needs` isn't read.
            return
        needs: Sequence[Need] = getattr(body, "needs", ())
        if not needs:
            return
        with self._lock:
            lacking = self._driver.list_lacking(needs)
            if lacking:
                bundle = self._driver.create_bundle(lacking)
                self._send(to_worker.Define(tuple(bundle.definitions), tuple(bundle.names)), bundle.body)
                self._driver.mark_sent(bundle)
                self._held.update(bundle.definitions)
                self._sent_count += 1
            sent_count = self._sent_count
        # Another thread may have sent definitions that are still in transit.
        if wait and self._confirmed_count < sent_count:
            self._ask(questions.Flush())
            self._confirmed_count = max(self._confirmed_count, sent_count)

    def forget_driver(self) -> None:
        """Reset for the next driver, which has no definitions yet, and runs another script."""
        with self._lock:
            self._driver = Table("another")
        self._modules.drop_unimported()
