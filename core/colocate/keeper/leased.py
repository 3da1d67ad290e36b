"""Who commands a keeper: one driver at a time, each by a higher epoch than the one before; for a while, nobody.

A keeper whose pool may be detached has one. Until the pool is detached, the end of its driver is its end, as for any
other. The lead keeper of a pool has the record and decides who may have it; the others take the lead's word, which is
an epoch higher than theirs.
"""

from __future__ import annotations

import time
from typing import Any

import attrs

from colocate._system.limits import LEAD_SLACK_S
from colocate.executor import Lease


@attrs.define(eq=False)
class Leased:
    """The state of one keeper."""

    epoch: int = 1  # that of the driver that commands it, or did last
    owned: bool = True  # whether the end of that driver is the end of all
    lease: Lease | None = None  # that of the last detach; None before the first
    who: str = ""  # who commands it, in words; empty when nobody does
    since: float = attrs.field(factory=time.time)  # since when, in seconds of time.time()
    vacancies: int = 0  # how often it has been without a driver
    ends: float | None = None  # when the time to live is over, by time.monotonic(); None while somebody commands it

    def refusal(self, epoch: int, own: bool) -> tuple[str, str] | None:
        """Why a newcomer can't have it: a kind and words; None when it can."""
        if self.lease is None:
            return "closed", "it hasn't been detached"
        if epoch:
            return (
                None if epoch > self.epoch else ("late", f"{self.who or 'another driver'} has it (epoch {self.epoch})")
            )
        if not self.lease.lead:
            return "closed", "its lead keeper isn't here"
        if self.who and not own:
            return "borrowed", f"{self.who}, since {time.strftime('%F %T', time.localtime(self.since))}"
        return None

    def grant(self, epoch: int, who: str, own: bool) -> None:
        """A newcomer has it from now on."""
        self.epoch = epoch or self.epoch + 1
        self.owned, self.who, self.since, self.ends = own, who, time.time(), None

    def vacate(self) -> float:
        """Nobody has it from now on; how long it lives like that."""
        assert self.lease is not None
        left = self.lease.ttl if self.lease.lead else self.lease.ttl + LEAD_SLACK_S
        self.vacancies += 1
        self.who, self.since, self.ends = "", time.time(), time.monotonic() + left
        return left

    def seen(self) -> dict[str, Any]:
        """What listings show."""
        assert self.lease is not None
        left = None if self.ends is None else max(0.0, self.ends - time.monotonic())
        return {
            "name": self.lease.name,
            "answers": True,
            "epoch": self.epoch,
            "driver": self.who or None,
            "owned": self.owned,
            "ttl_s": self.lease.ttl,
            "left_s": left,
            "since": self.since,
            **self.lease.about,
        }
