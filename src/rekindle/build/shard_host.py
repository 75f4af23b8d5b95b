"""The shard's side of a link: `rekindle shard` loads stages and serves them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from rekindle.build.model import open_weights_of
from rekindle.build.probe import user_link_key
from rekindle.build.stage import StageConfig, load_stage
from rekindle.build.types import check_dtype
from rekindle.build.watch import FileWatcher
from rekindle.errors import BadConfig
from rekindle.shards import ShardKeys, ShardServer, is_loopback, load_keys, load_public, serve_forever, shared_keys
from rekindle.weights import WeightFile

log = logging.getLogger("rekindle.build")


def build_shard(
    file: WeightFile, configs: Sequence[StageConfig], endpoint: str, keys: ShardKeys | None = None
) -> ShardServer:
    """A server of several stages of one model, by the names of their devices. Not started yet."""
    for config in configs:
        check_dtype(config.dtype)
        if config.span.stop > file.spec.layers:
            raise BadConfig(f"--span {config.span} reaches beyond the model, which has {file.spec.layers} layers")
    first = configs[0]
    stages = {config.device: load_stage(file, config) for config in configs}
    fingerprint = file.fingerprint()
    file.files.check()  # the fingerprint is of the bytes that were loaded
    return ShardServer(
        stages,
        endpoint,
        fingerprint=fingerprint,
        hidden_dtype=first.dtype,
        kv_dtype=first.kv_term,
        keys=keys,
        vocabulary=file.spec.vocab,
        rewind_rows=first.rewind_rows,
    )


def host_shard(
    model: Path | None, configs: Sequence[StageConfig], endpoint: str, key: Path | None, allowed: Sequence[Path]
) -> None:
    """Serve the stages until a signal or the head ends the process."""
    keys = _shard_keys(endpoint, key, allowed)
    file = open_weights_of(model)
    server = build_shard(file, configs, endpoint, keys)
    FileWatcher(file.files, lambda reason: log.error("%s; this shard goes on with what it loaded", reason))
    serve_forever(server)


def _shard_keys(endpoint: str, key: Path | None, allowed: Sequence[Path]) -> ShardKeys | None:
    """The keys that were named; else on loopback the user's own; none for a socket file."""
    if (key is None) != (not allowed):
        given, missing = ("--allow", "--key") if key is None else ("--key", "--allow")
        raise BadConfig(f"{given} without {missing} lets nobody in: name this shard's key pair and the heads it allows")
    if key is not None:
        return ShardKeys(load_keys(key), frozenset(map(load_public, allowed)))
    if not is_loopback(endpoint):
        return None
    pair = shared_keys(user_link_key())
    return ShardKeys(pair, frozenset({pair.public}))
