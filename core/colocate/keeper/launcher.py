"""The thread that starts worker processes: the kernel ties their lives to it, so it lives as long as they may."""

from __future__ import annotations

from colocate._system.jobs import JobThread, report_exception


class Launcher(JobThread):
    """Runs jobs one after the other on a thread of its own; `run` waits for one, `soon` doesn't, `close` ends it."""

    def __init__(self) -> None:
        """Make it; the thread starts with the first job."""
        super().__init__("colocate-launcher", lambda error: report_exception())
