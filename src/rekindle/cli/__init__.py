"""One module per command; what they print is for people."""

from __future__ import annotations

import sys

from rekindle import __version__

VERSION = f"rekindle {__version__}"
INTERRUPTED = 130  # as shells say it: 128 and the number of SIGINT


def main() -> None:
    if sys.argv[1:] == ["--version"]:
        print(VERSION)
        return
    try:
        from rekindle.cli.commands import run  # here, since torch comes with it, which the version need not wait for

        run()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
