"""Entry point of worker processes."""

import sys

from colocate._parent import die_with

die_with(int(sys.argv[2]))  # first: what comes next takes a while to import, and its driver may go meanwhile

from colocate.worker.main import main  # noqa: E402

main()
