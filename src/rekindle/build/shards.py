"""The head's side of a link: starts shards, and connects to stages in them.

A shard that the head starts gets the plan's numbers as arguments appended to its command. One that runs already got its
numbers on its own command line; the handshake compares them with the plan and refuses, naming both sides.
"""

from __future__ import annotations

import json
import logging
import shutil
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from rekindle.build.machine import shard_of
from rekindle.build.probe import user_link_key
from rekindle.build.stage import StageConfig
from rekindle.config import Config, ShardSetting
from rekindle.errors import BadConfig
from rekindle.shards import (
    Deadlines,
    HeadKeys,
    RemoteStage,
    ShardKeeper,
    is_loopback,
    load_keys,
    load_public,
    shared_keys,
)
from rekindle.spec import PAGE
from rekindle.stages import Stage

log = logging.getLogger("rekindle.build")

START_SECONDS = 900.0  # a large span comes from a slow disk


def arguments(configs: Sequence[StageConfig], endpoint: str, threads: int) -> list[str]:
    """The configs as command-line arguments of `rekindle shard`."""
    first = configs[0]
    common = ["--listen", endpoint, "--slots", str(first.slots), "--kv-type", first.kv_type, "--dtype", first.dtype]
    given = [*common, "--kv-mode", first.kv_mode, "--kv-policy", first.kv_policy, "--threads", str(threads)]
    given += ["--rewind-rows", str(first.rewind_rows), "--attended", str(first.attended)]
    given += ["--chunk", str(first.chunk), "--table-width", str(first.table_width)]
    for config in configs:
        given += ["--device", config.device, "--span", f"{config.span.start}:{config.span.stop}"]
        given += ["--pages", str(config.pages), "--host-pages", str(config.host_pages)]
        given += ["--slabs", str(config.slabs), "--slot-pages", str(config.slot_pages)]
        experts = None
        if config.hot is not None:
            experts = {"hot": config.hot, "cache_slots": config.cache_slots, "lendable": config.lendable}
        given += ["--experts", json.dumps(experts, separators=(",", ":"))]
    return given


class Shards:
    """The shards of one head: those that it starts, and those of which it has only the address."""

    def __init__(self, config: Config) -> None:
        self._settings = {shard.name: shard for shard in config.shards}
        self._link_key = config.link_key
        self._folder = Path(tempfile.mkdtemp(prefix="rekindle-"))  # for its owner only, like the sockets in it
        self._keepers: dict[str, ShardKeeper] = {}
        self._threads = config.threads or torch.get_num_threads()

    def start(self, names: Sequence[str], configs: Sequence[StageConfig]) -> None:
        """Start the processes, all at once: each of them loads for a while. `names` are the plan's device names."""
        wanted = {
            shard.name: [config for name, config in zip(names, configs, strict=True) if shard_of(name) == shard.name]
            for shard in self._settings.values()
            if shard.command
        }
        if not wanted:
            return
        with ThreadPoolExecutor(len(wanted)) as pool:
            started = [pool.submit(self._start, name, its_configs) for name, its_configs in wanted.items()]
        errors = [error for future in started if (error := future.exception()) is not None]
        if errors:
            raise errors[0]

    def _start(self, name: str, configs: Sequence[StageConfig]) -> None:
        endpoint = self._endpoint(self._settings[name])
        command = [*self._settings[name].command, *arguments(configs, endpoint, self._threads)]
        self._keepers[name] = ShardKeeper(command, endpoint, START_SECONDS)

    def connect(self, name: str, config: StageConfig, fingerprint: str) -> Stage:
        """The stage on the device `name`, say cuda:0@lab."""
        setting = self._settings[shard_of(name)]
        stage = RemoteStage(
            self._endpoint(setting),
            config.device,
            config.terms(fingerprint),
            keys=self._keys(setting),
            deadlines=Deadlines(),
            keeper=self._keepers.get(setting.name),
        )
        has, planned = stage.pages().total, config.pages + config.host_pages
        if has < planned:
            log.warning(
                "%s holds %d pages of KV (%s tokens), the plan counted on %d: fewer sequences can reach the context "
                "limit at once; start it with --pages %d --host-pages %d",
                name, has, f"{has * PAGE:,}", planned, config.pages, config.host_pages,
            )  # fmt: skip
        return stage

    def pid(self, name: str) -> int:
        return self._keepers[name].pid

    def stop(self) -> None:
        for keeper in self._keepers.values():
            keeper.stop()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _endpoint(self, setting: ShardSetting) -> str:
        return setting.endpoint or f"ipc://{self._folder / setting.name}"

    def _keys(self, setting: ShardSetting) -> HeadKeys | None:
        if setting.key is None and is_loopback(setting.endpoint):
            pair = shared_keys(user_link_key())
            return HeadKeys(pair, pair.public)
        if setting.key is None:
            return None
        if self._link_key is None:
            raise BadConfig(f"--shard-key {setting.name}={setting.key} needs this head's own --link-key too")
        return HeadKeys(load_keys(self._link_key), load_public(setting.key))
