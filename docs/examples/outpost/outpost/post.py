"""The far side: `python -m outpost.post` reads what it is to keep, says its address, and goes when it is let go."""

import json
import os
import sys

from colocate.keeper import Keeper


def main() -> None:
    told = json.loads(sys.stdin.readline())
    key = bytes.fromhex(told["key"])
    keeper = Keeper(key, **told["where"], env=told["env"], name=told["name"], on_end=lambda: os._exit(0))
    print(keeper.address, flush=True)
    sys.stdin.read()  # until the driver closes it, or is gone
    keeper.close()


if __name__ == "__main__":
    main()
