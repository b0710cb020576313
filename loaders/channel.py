"""Messages between a process and its decode worker: pickles over a socket pair, every wait bounded.

A message is a count, the sizes of its parts, then the parts: one pickle (protocol 5) and its out-of-band
buffers, so an array is written from and read into its own memory, without a copy inside a pickle. The peer
is always a process that this project started; nothing that was read from a shard is ever unpickled.
"""

from __future__ import annotations

import pickle
import socket
import struct
import time
from typing import Any

import numpy as np

_MAX_PARTS = 1 << 16


class Channel:
    """One end of a socket pair.

    Waits raise ``TimeoutError`` at their deadline, ``EOFError`` when the peer has closed or died.
    """

    def __init__(self, end: socket.socket) -> None:
        self._socket = end

    def send(self, message: Any, *, deadline: float | None) -> None:
        """Write ``message``. A deadline is a ``time.monotonic`` moment; None waits while the peer lives."""
        buffers: list[pickle.PickleBuffer] = []
        head = pickle.dumps(message, protocol=5, buffer_callback=buffers.append)
        parts = [memoryview(head), *(buffer.raw() for buffer in buffers)]
        sizes = struct.pack(f"<I{len(parts)}Q", len(parts), *(part.nbytes for part in parts))
        try:
            for part in (memoryview(sizes), *parts):
                self._bound(deadline)
                self._socket.sendall(part)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise EOFError("peer has closed the channel") from error

    def receive(self, *, deadline: float | None) -> Any:
        """Return the next message; arrays in it own their memory and are writable."""
        (num_parts,) = struct.unpack("<I", self._read(4, deadline))
        if not 0 < num_parts <= _MAX_PARTS:
            raise EOFError(f"peer announces a message of {num_parts} parts")
        sizes = struct.unpack(f"<{num_parts}Q", self._read(8 * num_parts, deadline))
        head, *buffers = [self._read(size, deadline) for size in sizes]
        return pickle.loads(head, buffers=buffers)

    def shutdown(self) -> None:
        """End all waits on both sides, from any thread."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # the peer went first

    def close(self) -> None:
        """Release the descriptor; may be called again."""
        self._socket.close()

    def _read(self, size: int, deadline: float | None) -> memoryview:
        target = np.empty(size, dtype=np.uint8).data
        done = 0
        while done < size:
            self._bound(deadline)
            try:
                count = self._socket.recv_into(target[done:])
            except ConnectionResetError as error:
                raise EOFError("peer has closed the channel") from error
            if count == 0:
                raise EOFError("peer has closed the channel")
            done += count
        return target

    def _bound(self, deadline: float | None) -> None:
        if deadline is None:
            self._socket.settimeout(None)
            return
        rest = deadline - time.monotonic()
        if rest <= 0:
            raise TimeoutError("deadline passed")
        self._socket.settimeout(rest)
