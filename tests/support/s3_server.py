"""An S3-compatible store on a free port of this machine, found as a real one is: by the AWS variables."""

from __future__ import annotations

import os
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import fsspec
from moto.server import ThreadedMotoServer

from loaders import remote


@contextmanager
def serve_s3(bucket: str) -> Iterator[None]:
    """Serve an empty ``bucket`` until the end of the block."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    try:
        with s3_at(f"http://{host}:{port}"):
            # What it holds is the process's, not the server's.
            with urllib.request.urlopen(f"http://{host}:{port}/moto-api/reset", data=b"", timeout=20):
                fsspec.filesystem("s3").mkdir(bucket)
            yield
    finally:
        server.stop()


@contextmanager
def s3_at(address: str) -> Iterator[None]:
    """Find ``s3://`` at ``address`` in the block, also in the processes that it starts."""
    variables = {
        "AWS_ENDPOINT_URL": address,
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    with mock.patch.dict(os.environ, variables):
        _forget_stores()
        try:
            yield
        finally:
            _forget_stores()


def _forget_stores() -> None:
    """Stores read the variables when they are made, and are kept."""
    remote._filesystem_of.cache_clear()
    fsspec.get_filesystem_class("s3").clear_instance_cache()
