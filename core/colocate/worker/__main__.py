"""Entry point of worker processes, and of the template of which workers are forks."""

import sys

from colocate.worker.birth.supervisor import supervise

if sys.argv[1] == "forks":
    from colocate.worker.birth.template import Template

    Template().serve_forks()  # This returns in each fork, with the worker's arguments in `sys.argv`.


def start_ignoring_signals() -> None:
    """Ignore signals meant for the driver. Called in the worker before signals are unblocked."""
    from colocate.worker.birth.signals import ignore_driver_signals

    ignore_driver_signals()


# Supervisors are forked before the imports below, which would take memory in the supervisors, too.
supervise(int(sys.argv[2]), start_ignoring_signals)

from colocate.worker.birth.ending import end_process  # noqa: E402
from colocate.worker.birth.main import main  # noqa: E402

main()
end_process()
