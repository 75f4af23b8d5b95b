"""How the log is written: as text for people, or as one JSON object a line."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any

from rich.console import Console
from rich.logging import RichHandler

from rekindle.config import printable
from rekindle.errors import BadConfig

FORMATS = ("text", "json")


class _Printable(logging.Formatter):
    """Lines quote file names, tensors and what clients sent."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record), keep="\n\t")


class _JsonLines(logging.Formatter):
    """Lines about requests have their fields beside the message."""

    def format(self, record: logging.LogRecord) -> str:
        told: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "request", {}),
        }
        if record.exc_info:
            told["error"] = self.formatException(record.exc_info)
        return json.dumps(told, default=str)


def _for_people() -> logging.Handler:
    console = Console(stderr=True)
    if console.is_terminal:
        handler: logging.Handler = RichHandler(console=console, show_path=False)
        handler.setFormatter(_Printable("%(message)s"))
    else:  # a file or a journal has one line per message
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(_Printable("%(asctime)s %(levelname)-8s %(message)s", "%Y-%m-%d %H:%M:%S"))
    return handler


def log_as(form: str) -> None:
    """From here on."""
    if form not in FORMATS:
        raise BadConfig(f"--log-format is {form}, known are {', '.join(FORMATS)}")
    if form == "text":
        handler = _for_people()
    else:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(_JsonLines())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    logging.getLogger("torch").setLevel(logging.WARNING)  # before it sets its own: Ctrl-C may come while it is imported
