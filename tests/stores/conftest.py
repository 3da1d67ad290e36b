from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from colocate.testing import leaks
from colocate_run.store import Store

BUCKET = "runs-of-tests"
_KEYS = {"ACCESS_KEY_ID": "anybody", "SECRET_ACCESS_KEY": "anything", "DEFAULT_REGION": "us-east-1"}


@pytest.fixture(scope="session")
def s3() -> Iterator[str]:
    """Start an S3 server that the environment names; return a bucket."""
    s3fs = pytest.importorskip("s3fs", reason="`make stores` has what s3:// needs")
    server = pytest.importorskip("moto.server", reason="`make stores` has a server").ThreadedMotoServer("127.0.0.1", 0)
    with pytest.MonkeyPatch.context() as patch:
        with leaks.share_between_tests():
            server.start()
            host, port = server.get_host_and_port()
            for key, value in {**_KEYS, "ENDPOINT_URL": f"http://{host}:{port}"}.items():
                patch.setenv(f"AWS_{key}", value)
            s3fs.S3FileSystem().mkdir(BUCKET)
            Store(f"s3://{BUCKET}").has_run("warm")
        yield BUCKET
        server.stop()


@pytest.fixture(params=["memory", "file", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return the address of an unused folder of a store: in memory, on a disk, or on a server."""
    name = uuid.uuid4().hex
    if request.param == "s3":
        return f"s3://{request.getfixturevalue('s3')}/{name}/deep"
    return f"memory://{name}/deep" if request.param == "memory" else f"file://{tmp_path}/store/deep"
