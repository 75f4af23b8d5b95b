"""One module per command; what they print is for people."""

from __future__ import annotations

import gc
import sys

from rekindle import __version__

VERSION = f"rekindle {__version__}"
INTERRUPTED = 130  # as shells say it: 128 and the number of SIGINT


def main() -> None:
    # Modules stay, and to walk through them is a sixth of the time that importing them takes. So the garbage collector
    # rests until the command has been imported (`command_named`).
    gc.disable()
    try:
        from rekindle.cli.commands import run  # here, so that an interrupt has its answer from the first import on

        run()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
