"""A role whose module reads an environment variable at import."""

import os

from colocate import Role, method

AT_IMPORT = os.environ.get("COLOCATE_PROBE")


class Early(Role):
    """A role that returns the environment variable that its module has read at import."""

    @method
    def at_import(self) -> str | None:
        """Return the environment variable as it was at import."""
        return AT_IMPORT
