"""What each import of verl loads (its entry point `verl.plugins`): the door, where `COLOCATE_VERL` is set."""

import os
import sys

if chosen := os.environ.get("COLOCATE_VERL"):
    from colocate_verl import install, private

    try:
        install(chosen)
    except Exception as error:  # verl swallows what a plugin raises: it is told here, and by the first worker group
        print(f"[colocate_verl] COLOCATE_VERL={chosen}: {error}", file=sys.stderr)
        private.refuse(error)
