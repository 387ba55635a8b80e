"""Show progress, and keep repeated messages of other packages out of the output."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from tqdm import tqdm

_FORMAT = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt}, {rate_noinv_fmt}, {remaining} left"
_UNIMPORTANT = ("requires torchvision (not installed)",)  # the Pillow version does the same


@contextmanager
def progress_bar(name: str, total: int, show: bool) -> Iterator[Callable[[int], None]]:
    """Show the number of items, items per second and the time left. Yields: function to call with the number done.

    Without a terminal, it is written once a minute, so that a log stays short.
    """
    every_s = 0.5 if sys.stderr.isatty() else 60.0
    with tqdm(
        total=total, desc=name, unit=f" {name}", disable=not show, mininterval=every_s, bar_format=_FORMAT, miniters=1
    ) as bar:

        def done(number: int) -> None:
            bar.update(number - bar.n)

        yield done


@contextmanager
def quiet_packages(show_bars: bool) -> Iterator[None]:
    """Within this context, let diffusers and transformers print each message once.

    A message such as "the input was truncated" would otherwise appear for every long caption.

    Args: show_bars: show their progress bars; they are hidden without a terminal in any case.
    """
    from diffusers.utils import logging as of_diffusers
    from transformers.utils import logging as of_transformers

    with ExitStack() as stack:
        for package in (of_diffusers, of_transformers):
            package.get_logger()  # adds the handler
            for handler in logging.getLogger(package.__name__.partition(".")[0]).handlers:
                once = _Once()
                handler.addFilter(once)
                stack.callback(handler.removeFilter, once)
            if package.is_progress_bar_enabled() and not (show_bars and sys.stderr.isatty()):
                package.disable_progress_bar()
                stack.callback(package.enable_progress_bar)
        yield


class _Once(logging.Filter):
    """Let the first message of each line of code pass."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: set[tuple[str, int]] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        line = (record.pathname, record.lineno)
        if line in self._seen or any(text in str(record.msg) for text in _UNIMPORTANT):
            return False
        self._seen.add(line)
        return True
