"""An S3-compatible store on a free port of this machine, found as a real one is: by the AWS variables."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import fsspec
from moto.server import ThreadedMotoServer

from loaders import remote


@contextmanager
def serve_s3(bucket: str) -> Iterator[dict[str, str]]:
    """Serve an empty ``bucket`` until the end of the block; yields the variables that lead to it."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    variables = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    try:
        with mock.patch.dict(os.environ, variables):
            _forget_stores()
            fsspec.filesystem("s3").mkdir(bucket)
            yield variables
    finally:
        _forget_stores()
        server.stop()


def _forget_stores() -> None:
    """Stores read the variables when they are made, and are kept."""
    remote._filesystem_of.cache_clear()
    fsspec.get_filesystem_class("s3").clear_instance_cache()
