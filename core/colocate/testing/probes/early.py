"""A role whose module looks at the environment when it is imported."""

import os

from colocate import Role, method

AT_IMPORT = os.environ.get("COLOCATE_PROBE")


class Early(Role):
    """Tells what its module saw when it was imported."""

    @method
    def at_import(self) -> str | None:
        """The environment variable, at import and as it is now."""
        return AT_IMPORT
