"""Ranges over HTTP, byte by byte as they come, so that what arrived before a failure is kept.

fsspec's own range read throws away a body that breaks off, takes the body of a server that ignores ranges for
the range, and calls every failed look at a file "not found". So only its session is used (with the headers
and the log-in of fsspec's configuration). Ranges are those of RFC 9110, section 14.
"""

from __future__ import annotations

import re
from typing import Any

from omni_pipeline.core.errors import ShardError

_CONTENT_RANGE = re.compile(r"bytes (?:(\d+)-\d+|\*)/(\d+|\*)")


async def fetch_http(
    system: Any, url: str, offset: int, length: int, *, into: bytearray, timeout_s: float
) -> None:
    """Append to ``into`` what comes of the range, ``length`` bytes at most.

    Fewer are no error here: ``into`` tells how far it got. ``timeout_s`` bounds the silence between two
    pieces, not the whole.

    Raises:
        FileNotFoundError, PermissionError: As the server says.
        ShardError: The server ignores ranges.
        OSError, aiohttp.ClientError: The request failed; it may be tried again.
    """
    async with await _get(system, url, offset, length, timeout_s=timeout_s) as response:
        if response.status == 416:
            return
        _raise_for_status(response, url)
        if offset and response.status == 200:
            raise ShardError(
                "the server ignores ranges, so a part of a shard cannot be read",
                where=url,
                fix="serve the shards with a server that supports range requests, or copy them to a disk",
            )
        start = _content_range(response)[0]
        if response.status == 206 and start != offset:
            raise ConnectionError(f"asked for byte {offset}, got {start}")
        async for piece in response.content.iter_any():
            into += piece[: length - len(into)]
            if len(into) == length:
                return


async def http_info(system: Any, url: str, *, timeout_s: float) -> dict[str, Any]:
    """Return "size" and, where the server has them, "ETag" and "LastModified" of ``url``.

    Of the first byte: the answer to HEAD is made by other code in many servers, and is often without a size.

    Raises:
        As ``fetch_http``; ShardError if the server does not tell the size.
    """
    async with await _get(system, url, 0, 1, timeout_s=timeout_s) as response:
        if response.status != 416:
            _raise_for_status(response, url)
        size = _content_range(response)[1] if response.status != 200 else response.content_length
        if size is None:
            raise ShardError(
                "the server does not tell the size of the shard",
                where=url,
                fix="serve the shards with a server that supports range requests",
            )
        tags = {"ETag": "ETag", "Last-Modified": "LastModified"}
        found = {ours: response.headers[name] for name, ours in tags.items() if name in response.headers}
        return {"size": size, **found}


async def _get(system: Any, url: str, offset: int, length: int, *, timeout_s: float) -> Any:
    import aiohttp  # only http shards need it

    session = await system.set_session()
    options = dict(system.kwargs)
    # A compressed body would make other bytes of the range.
    asked = {"Range": f"bytes={offset}-{offset + length - 1}", "Accept-Encoding": "identity"}
    options["headers"] = {**options.get("headers", {}), **asked}
    options["timeout"] = aiohttp.ClientTimeout(total=None, sock_connect=timeout_s, sock_read=timeout_s)
    return session.get(system.encode_url(url), **options)


def _raise_for_status(response: Any, url: str) -> None:
    if response.status in (404, 410):
        raise FileNotFoundError(url)
    if response.status in (401, 403):
        raise PermissionError(f"{response.status} {response.reason}")
    if response.status >= 400:
        raise ConnectionError(f"the server says {response.status} {response.reason}")


def _content_range(response: Any) -> tuple[int | None, int | None]:
    """Return the first byte of the body and the size of the whole, as far as the server tells them."""
    match = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
    if match is None:
        return None, None
    start, size = match.groups()
    return None if start is None else int(start), None if size in (None, "*") else int(size)
