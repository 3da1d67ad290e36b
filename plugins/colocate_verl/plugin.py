"""The entry point `verl.plugins`, loaded by each import of verl: installs the plugin if `COLOCATE_VERL` is set."""

import os
import sys

if chosen := os.environ.get("COLOCATE_VERL"):
    from colocate_verl import install, private

    try:
        install(chosen)
    except Exception as error:  # verl swallows this error; the first worker group repeats the error
        print(f"[colocate_verl] COLOCATE_VERL={chosen}: {error}", file=sys.stderr)
        private.refuse(error)
