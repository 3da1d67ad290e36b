"""Entry point of worker processes, and of the template that workers are forks of."""

import sys

from colocate.worker.birth.supervisor import supervise

if sys.argv[1] == "forks":
    from colocate.worker.birth.template import Template

    Template().run()  # it returns in each worker, with the worker's arguments


def leave_signals() -> None:
    """Begin as a worker, before a signal comes."""
    from colocate.worker.birth.signals import leave_to_the_driver

    leave_to_the_driver()


supervise(int(sys.argv[2]), leave_signals)  # first: whatever is imported before is in the supervisors' memory too

from colocate.worker.birth.ending import end  # noqa: E402
from colocate.worker.birth.main import main  # noqa: E402

main()
end()
