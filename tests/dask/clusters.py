"""A Dask cluster of workers of several kinds on this machine, in its own process, which tests join as drivers do.

Its arguments are a JSON list of workers (`host`, `nthreads`, `resources`, `memory_limit`, `env`, `preload`) and the
scheduler's port, 0 for any. A third argument, a folder of certificates, turns on TLS. The program prints the options
to connect with, and ends at the end of its input.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any, cast

from distributed import Nanny, Scheduler, Security


def security(folder: Path, whose: str = "good") -> Security:
    sides = {
        f"tls_{side}_{part}": str(folder / f"{whose}-{part}.pem")
        for side in ("client", "scheduler", "worker")
        for part in ("cert", "key")
    }
    made: Any = Security
    return cast(Security, made(tls_ca_file=str(folder / f"{whose}-ca.pem"), require_encryption=True, **sides))


async def main(workers: list[dict[str, Any]], port: int, folder: Path | None) -> None:
    own = None if folder is None else security(folder)
    protocol = "tcp" if own is None else "tls"
    quiet: dict[str, Any] = {"dashboard": False, "dashboard_address": "127.0.0.1:0"}
    scheduler: Any = Scheduler(protocol=protocol, host=workers[0]["host"], port=port, security=own, **quiet)
    async with scheduler:
        options = [{"memory_limit": 0, **quiet, **each} for each in workers]
        nannies = [Nanny(scheduler.address, protocol=protocol, security=own, **each) for each in options]
        await asyncio.gather(*nannies)
        print(json.dumps({"address": scheduler.address}), flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
        await asyncio.gather(*(nanny.close() for nanny in nannies))


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]) if len(sys.argv) > 3 else None))
