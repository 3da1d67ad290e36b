"""Placement: the range of ports of a runtime."""

from __future__ import annotations

import socket

import pytest

import colocate
from colocate.errors import ColocateError
from colocate.executor import OwnProcess
from colocate.testing.executors import placement
from colocate.testing.executors._base import needs, needs_feature
from colocate.testing.probes.collectives import Collective


class Ports(placement.Ports):
    """`connect(ports=...)`."""

    @needs(OwnProcess)
    @needs_feature("looking")
    def test_ports_that_are_used_up(self, no_leaks: None) -> None:
        """An exhausted port range raises an error with the range, the port's purpose and a remedy; nothing is left."""
        pytest.importorskip("torch")
        with socket.create_server(("", 0)) as listener:
            port = listener.getsockname()[1]
            with self.connect(ports=f"{port}-{port}") as runtime:
                role = colocate.role(Collective).on(default_group=True)
                with pytest.raises(
                    ColocateError,
                    match=rf"no port of {port}-{port} is free on .* for (a keeper|torch's store).*: give more of them "
                    r"\(connect\(\.\.\., ports=\.\.\.\)\)",
                ):
                    runtime.reserve(2, cpus=0, strategy=self.strategy).spawn({"all": role})
                assert not runtime.groups
                assert not runtime.audit()
