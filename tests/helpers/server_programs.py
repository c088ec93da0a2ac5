"""The server as a process of its own."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import subprocess
import sys
import threading
from collections.abc import Iterator

RUN = "from mlx_paged.server import main; sys.exit(main(sys.argv[1:]))"


class Program:
    """A server process, and what it has said on stderr."""

    def __init__(self, process: subprocess.Popen[str]):
        self.process = process
        self.said: list[str] = []
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        self.url = self.wait_for(r"listening on (http://\S+);")

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._lines.put(line)
        self._lines.put(None)

    def wait_for(self, pattern: str) -> str:
        """The first group of the next line that has the pattern."""
        while True:
            line = self._lines.get(timeout=60)
            assert line is not None, f"no line has {pattern}: {self.said}"
            self.said.append(line)
            if match := re.search(pattern, line):
                return match[1] if match.groups() else match[0]

    def end(self) -> int:
        """Wait for the end, and return the exit status."""
        status = self.process.wait(60)
        self._reader.join()
        while (line := self._lines.get()) is not None:
            self.said.append(line)
        assert "Traceback" not in "".join(self.said)
        return status

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)


@contextlib.contextmanager
def running(*flags: str, patch: str | None = None) -> Iterator[Program]:
    start = ["-m", "mlx_paged.server"] if patch is None else ["-c", patch + RUN]
    process = subprocess.Popen(
        [sys.executable, *start, "--port", "0", "--kv-cache-bytes", "500blocks", *flags],
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield Program(process)
    finally:
        process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()
