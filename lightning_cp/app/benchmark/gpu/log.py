"""A log file of bounded size."""

from __future__ import annotations

import threading
from collections import deque
from pathlib import Path
from typing import IO

from lightning_cp.files import no_link

MAX_BYTES = 30 << 20  # of the file, except for the ends of outputs
HEAD_BYTES, TAIL_BYTES = 4 << 20, 64 << 10
_CHUNK_BYTES = 1 << 14


class LogWriter:
    """Copy a pipe into a file in a thread: the first `HEAD_BYTES`, and at the end the last `TAIL_BYTES`.

    The bytes in between are omitted. Once the file has `MAX_BYTES`, the head is omitted too.
    """

    def __init__(self, pipe: IO[bytes], path: Path) -> None:
        self._pipe, self._path = pipe, path
        self._left_out = 0
        self._chunks: deque[bytes] = deque()
        self._thread = threading.Thread(target=self._copy, name="lightning_cp_log", daemon=True)
        self._thread.start()

    def finish(self, *, within_s: float = 5.0) -> str:
        """Wait for the end of the pipe, write the end of the output, and return it.

        Args: within_s: time limit in seconds: a process that outlives its parent can keep the pipe open.
        """
        self._thread.join(within_s)
        tail = b"".join(self._chunks)[-TAIL_BYTES:]
        return tail.decode(errors="replace")

    def _copy(self) -> None:
        with self._pipe, open(self._path, "ab", opener=no_link) as file:
            head_left, omitted = max(0, min(HEAD_BYTES, MAX_BYTES - file.tell())), 0
            while chunk := self._pipe.read1(_CHUNK_BYTES):  # type: ignore[attr-defined]
                self._keep(chunk)
                written = chunk[:head_left]
                file.write(written)
                file.flush()
                head_left -= len(written)
                omitted += len(chunk) - len(written)
            if omitted:
                tail = b"".join(self._chunks)[-min(TAIL_BYTES, omitted) :]
                file.write(f"\n[{omitted - len(tail)} bytes left out]\n".encode() + tail)

    def _keep(self, chunk: bytes) -> None:
        self._chunks.append(chunk)
        while sum(map(len, self._chunks)) - len(self._chunks[0]) >= TAIL_BYTES:
            self._chunks.popleft()
