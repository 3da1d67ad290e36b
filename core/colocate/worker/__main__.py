"""Entry point of worker processes, and of the template of which workers are forks."""

import sys

from colocate.worker.birth.supervisor import supervise

if sys.argv[1] == "forks":
    from colocate.worker.birth.template import Template

    Template().run()  # This returns in each fork, with the worker's arguments in `sys.argv`.


def leave_signals() -> None:
    """Set the worker's signal handling, before a signal arrives."""
    from colocate.worker.birth.signals import leave_to_the_driver

    leave_to_the_driver()


# This comes first, because earlier imports would take memory in the supervisors, too.
supervise(int(sys.argv[2]), leave_signals)

from colocate.worker.birth.ending import end  # noqa: E402
from colocate.worker.birth.main import main  # noqa: E402

main()
end()
