"""A real S3 server: moto's, in a process of its own."""

import hashlib
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import boto3
import pytest

PATIENCE_S = 60.0
BUCKET = "bucket"


class S3(NamedTuple):
    """A server with an empty bucket.

    Attributes:
        address: "http://127.0.0.1:PORT".
        log: the file that it logs requests to.
        process: its process.
    """

    address: str
    log: Path
    process: "subprocess.Popen[bytes]"

    @property
    def environment(self) -> dict[str, str]:
        """What obstore is to find in the environment."""
        return {
            "AWS_ENDPOINT_URL": self.address,
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": "anybody",
            "AWS_SECRET_ACCESS_KEY": "anything",
            "AWS_REGION": "us-east-1",
        }

    def new_prefix(self, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
        """Name the server in the environment. Returns a URL in the bucket that a test has for itself."""
        for name, value in self.environment.items():
            monkeypatch.setenv(name, value)
        return f"s3://{BUCKET}/{hashlib.sha256(request.node.nodeid.encode()).hexdigest()[:12]}"

    def requests(self) -> list[tuple[str, str]]:
        """The method and the key of each request so far."""
        return re.findall(rf"(GET|PUT|HEAD|POST|DELETE) /{BUCKET}/([^? ]*)", self.log.read_text())

    def delete(self, key: str) -> None:
        self._client.delete_object(Bucket=BUCKET, Key=key)

    def put(self, key: str, content: bytes) -> None:
        self._client.put_object(Bucket=BUCKET, Key=key, Body=content)

    def get(self, key: str) -> bytes:
        return bytes(self._client.get_object(Bucket=BUCKET, Key=key)["Body"].read())

    @property
    def _client(self) -> Any:
        """Amazon's own client."""
        return boto3.client(
            "s3",
            endpoint_url=self.address,
            region_name=self.environment["AWS_REGION"],
            aws_access_key_id=self.environment["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=self.environment["AWS_SECRET_ACCESS_KEY"],
        )


@contextmanager
def s3_server(folder: Path, host: str = "127.0.0.1") -> Iterator[S3]:
    """Run a server at an address of this machine until the block ends."""
    log = folder / "s3.log"
    command = [sys.executable, "-m", "moto.server", "-H", host, "-p", "0"]
    with log.open("wb") as sink, subprocess.Popen(command, stderr=sink, stdout=subprocess.DEVNULL) as process:
        try:
            deadline = time.monotonic() + PATIENCE_S
            while (match := re.search(rf"Running on (http://{host}:\d+)", log.read_text())) is None:
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < deadline
                time.sleep(0.05)
            server = S3(match[1], log, process)
            server._client.create_bucket(Bucket=BUCKET)
            yield server
        finally:
            process.terminate()
