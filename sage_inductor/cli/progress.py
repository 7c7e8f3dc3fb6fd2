"""Where a command is, on stderr, so that a minute of compiling does not look like a hang.

On a terminal it is one line, written again each second; in a log, a line when a step begins and
one for each ten seconds that it lasts. (tqdm writes nothing while a step runs, rich nothing into a
log, and neither need be there.)
"""

import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")


class Progress:
    """``with Progress(3) as progress: progress.step("compiling"); ...``: the first of 3 steps."""

    EVERY = {True: 1, False: 10}  # seconds, on a terminal and in a log

    def __init__(self, total: int):
        self.total, self.number, self.what, self.start = total, 0, "", 0.0
        self._on_terminal = sys.stderr.isatty()
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._refresh, daemon=True)

    def __enter__(self) -> "Progress":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()
        if self._on_terminal:
            self._write("")

    def step(self, what: str) -> None:
        """The next step begins; the one before it is over."""
        with self._lock:
            self.number, self.what, self.start = self.number + 1, what, time.monotonic()
            self._write(self._line())

    def _refresh(self) -> None:
        while not self._over.wait(self.EVERY[self._on_terminal]):
            with self._lock:
                if self.number:
                    self._write(f"{self._line()}, {time.monotonic() - self.start:.0f} s")

    def _line(self) -> str:
        return f"step {self.number} of {self.total}: {self.what}"

    def _write(self, line: str) -> None:
        if self._on_terminal:
            width = shutil.get_terminal_size().columns - 1
            line = f"\r{line[:width].ljust(width)}\r"
        print(line, end="" if self._on_terminal else "\n", file=sys.stderr, flush=True)


def track(items: Iterable[Item], describe: Callable[[Item], str]) -> Iterator[Item]:
    """The items, each a step that `describe` gives its words."""
    items = list(items)
    with Progress(len(items)) as progress:
        for item in items:
            progress.step(describe(item))
            yield item
