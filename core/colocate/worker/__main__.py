"""Entry point of worker processes."""

import sys

from colocate.worker.supervisor import supervise

supervise(int(sys.argv[2]))  # first: whatever is imported before is in the supervisors' memory too

from colocate.worker.main import main  # noqa: E402

main()
