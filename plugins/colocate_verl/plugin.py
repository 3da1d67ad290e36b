"""The entry point `verl.plugins`, which verl loads when imported. It installs the plugin if `COLOCATE_VERL` is set."""

import os
import sys

if chosen := os.environ.get("COLOCATE_VERL"):
    from colocate_verl import install, private

    try:
        install(chosen)
    except Exception as error:  # verl ignores this error, so the first worker group raises the error.
        print(f"[colocate_verl] COLOCATE_VERL={chosen}: {error}", file=sys.stderr)
        private.refuse_all(error)
