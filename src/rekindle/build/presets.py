"""The presets file of `rekindle serve --models`: several models, each with options of its own.

[models.coder]                      # the id
file = "Qwen3.6-35B-A3B-Q4_K_M.gguf"  # beside the presets file, or an absolute path
aliases = ["claude-sonnet-4-5"]     # other names that clients may use
context = 131072                    # any of OPTIONS, spelt as on the command line
temperature = 0.6                   # any of DEFAULTS: for fields that a request leaves out
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rekindle.build.machine import available_ram
from rekindle.config import Config, parse_bytes
from rekindle.errors import BadConfig

MOST = 64  # models of one server


@dataclass(frozen=True, slots=True)
class Preset:
    """One model of a server, as its user describes it."""

    config: Config
    name: str | None = None  # its id; the file's name if left out
    aliases: tuple[str, ...] = ()
    defaults: tuple[tuple[str, float], ...] = ()  # of DEFAULTS: they win over the model's card


def _switch(value: Any, what: str) -> bool:
    if not isinstance(value, bool):
        raise BadConfig(f"{what} is {value!r}, which is neither true nor false")
    return value


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str) or not value:
        raise BadConfig(f"{what} must be a string, got {value!r}")
    return value


def _count(value: Any, what: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise BadConfig(f"{what} must be a whole number, got {value!r}")
    return value


def _number(value: Any, what: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise BadConfig(f"{what} must be a number, got {value!r}")
    return float(value)


def _bytes(value: Any, what: str) -> int:
    return parse_bytes(_text(value, what), what)


def _sizes(value: Any, what: str) -> tuple[int, ...]:
    return tuple(parse_bytes(part, what) for part in _text(value, what).split(","))


def _names(value: Any, what: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in _text(value, what).split(","))


def _path(value: Any, what: str) -> Path:
    return Path(_text(value, what))


DEFAULTS: dict[str, Callable[[Any, str], float]] = {
    "temperature": _number,
    "top-p": _number,
    "top-k": _count,
    "min-p": _number,
    "presence-penalty": _number,
    "repetition-penalty": _number,
    "max-tokens": _count,
}
OPTIONS: dict[str, Callable[[Any, str], Any]] = {
    "devices": _names,
    "split": _text,
    "context": _count,
    "sequences": _count,
    "queue": _count,
    "grid": _count,
    "max-gap": _count,
    "dtype": _text,
    "kv-type": _text,
    "kv-mode": _text,
    "kv-policy": _text,
    "live-memory": _switch,
    "draft": _text,
    "drafter": _path,  # beside the presets file, or absolute
    "pool": _count,
    "vram": _sizes,
    "ram": _bytes,
    "cache-ram": _bytes,
    "cache-disk": _bytes,
    "replicas": _count,
    "audit": _count,
}


def read_presets(path: Path, common: Config) -> list[Preset]:
    """common: what the command line says for every model."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadConfig(f"--models {path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadConfig(f"--models {path} is not TOML: {error}") from error
    models = table.pop("models", None)
    if table:
        raise BadConfig(f"--models {path}: unknown {', '.join(sorted(table))}; models stand in tables [models.NAME]")
    if not isinstance(models, dict) or not models:
        raise BadConfig(f"--models {path} names no model; write a table [models.NAME] for each")
    if len(models) > MOST:
        raise BadConfig(f"--models {path} names {len(models)} models, at most {MOST} can be served")
    check_drafter(common, len(models))
    common = shared_ram(common, len(models))
    return [_preset(path, name, given, common) for name, given in models.items()]


def check_drafter(config: Config, models: int) -> None:
    if config.drafter is not None and models > 1:
        raise BadConfig(
            f"--drafter {config.drafter} drafts for one model, there are {models}; give each its own in a --models file"
        )


def shared_ram(config: Config, models: int) -> Config:
    """Snapshots of all models share the RAM that --cache-ram gives them. Without it one model's plan decides; several
    share a quarter of what is free, so that the first to be loaded leaves room for the others."""
    whole = config.cache_ram
    if whole is None and models > 1:
        whole = available_ram() // 4
    return config if whole is None else replace(config, cache_ram=whole // models)


def _preset(path: Path, name: str, given: Any, common: Config) -> Preset:
    where = f"--models {path}: {name}"
    if not isinstance(given, dict):
        raise BadConfig(f"{where} must be a table, got {given!r}")
    keys = ("file", "aliases", *OPTIONS, *DEFAULTS)
    if unknown := sorted(given.keys() - set(keys)):
        raise BadConfig(f"{where} has an unknown key {unknown[0]}; known: {', '.join(keys)}")
    if "file" not in given:
        raise BadConfig(f"{where} has no file")
    aliases = given.get("aliases", [])
    if not isinstance(aliases, list):
        raise BadConfig(f"{where}.aliases must be a list of strings, got {aliases!r}")
    fields = {
        key.replace("-", "_"): read(given[key], f"{where}.{key}") for key, read in OPTIONS.items() if key in given
    }
    if "drafter" in fields:
        fields["drafter"] = path.parent / fields["drafter"]
    return Preset(
        replace(common, model=path.parent / _text(given["file"], f"{where}.file"), **fields),
        name,
        tuple(_text(alias, f"{where}.aliases") for alias in aliases),
        tuple(
            (key.replace("-", "_"), read(given[key], f"{where}.{key}"))
            for key, read in DEFAULTS.items()
            if key in given
        ),
    )
