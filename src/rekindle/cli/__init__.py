"""One module per command; what they print is for people."""

from __future__ import annotations

import sys

from rekindle import __version__

VERSION = f"rekindle {__version__}"
INTERRUPTED = 130  # as shells say it: 128 and the number of SIGINT


def main() -> None:
    try:
        from rekindle.cli.commands import run  # here, so that an interrupt has its answer from the first import on

        run()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
