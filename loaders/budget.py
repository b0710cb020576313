"""A byte budget that a producer waits for and a consumer gives back."""

from __future__ import annotations

import threading

_CHECK_S = 1.0


class ByteBudget:
    """Bounds the bytes that are held at one time.

    What is larger than the whole budget passes alone, when nothing else is held; so no size can block for
    ever. Grants must be asked for by one thread, in the order in which the bytes are given back.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._held_bytes = 0
        self._peak_bytes = 0
        self._closed = False
        self._changed = threading.Condition()

    @property
    def peak_bytes(self) -> int:
        """Most bytes held at one time so far."""
        with self._changed:
            return self._peak_bytes

    def acquire(self, num_bytes: int) -> bool:
        """Wait until ``num_bytes`` fit; return False when the budget was closed."""
        with self._changed:
            while not self._closed and self._held_bytes and self._held_bytes + num_bytes > self._max_bytes:
                self._changed.wait(timeout=_CHECK_S)
            if self._closed:
                return False
            self._held_bytes += num_bytes
            self._peak_bytes = max(self._peak_bytes, self._held_bytes)
            return True

    def release(self, num_bytes: int) -> None:
        """Give ``num_bytes`` back."""
        with self._changed:
            self._held_bytes -= num_bytes
            self._changed.notify_all()

    def close(self) -> None:
        """End all waits; nothing is granted any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
