"""Stages on the nodes of a Ray cluster, one actor each.

Every node needs this version of Rekindle and the model under the same path. GPUs come first; a cluster without any
uses its CPUs, one stage per node.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ray
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rekindle import __version__
from rekindle.build.machine import RAM_SHARE, VRAM_SHARE, available_ram, device_of
from rekindle.build.model import open_weights_of
from rekindle.build.shards import START_SECONDS
from rekindle.build.stage import StageConfig, load_stage
from rekindle.errors import BadConfig
from rekindle.kernels.native import set_threads
from rekindle.placement import Device, Machine
from rekindle.shards.ray_stage import ActorMaker, Message, RayStage, StageServant
from rekindle.spec import Span
from rekindle.stages import Stage


class StageActor:
    """Runs on a node: one stage, loaded there. Its arguments are plain values: another version may have sent them."""

    def __init__(self, version: str, model: str | None, config: dict[str, Any], threads: int) -> None:
        if version != __version__:
            raise BadConfig(f"this node has Rekindle {__version__}, the server {version}: install the same on both")
        set_threads(threads)
        span = Span(**config.pop("span"))
        wanted = StageConfig(span=span, **config)
        file = open_weights_of(Path(model) if model else None)
        stage, terms = load_stage(file, wanted), wanted.terms(file.fingerprint())
        file.files.check()  # the fingerprint is of the bytes that were loaded
        self._servant = StageServant(stage, terms)

    def run(self, message: Message) -> Message:
        return self._servant.run(message)


def look_around() -> dict[str, Any]:
    """On a node: the memory that may be used."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return {"ram": available_ram(), "vram": [torch.cuda.mem_get_info(i)[0] for i in range(count)]}


@dataclass(frozen=True, slots=True)
class RayNode:
    id: str
    address: str
    cpus: int
    gpus: int


class RayHosts:
    """The nodes of one cluster, as the head uses them."""

    def __init__(self, address: str, model: Path | None, threads: int | None) -> None:
        try:
            ray.init(address=address, include_dashboard=False, log_to_driver=False, logging_level=logging.WARNING)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise BadConfig(f"--ray {address}: no cluster answers there: {error}") from error
        self._model = str(model.resolve()) if model is not None else None
        self._threads = threads or torch.get_num_threads()
        self._nodes = {f"{node.address}.{node.id[:6]}": node for node in _nodes()}
        self.names = self._name_devices()

    def machine(self, ram: int | None) -> Machine:
        """Budgets as the nodes report them; nodes of one host share its RAM."""
        seen = {name: self._ask(node) for name, node in self._nodes.items()}
        sharing = Counter(node.address for node in self._nodes.values())
        own = ray.util.get_node_ip_address()
        ram = ram or int(available_ram() * RAM_SHARE)
        devices = []
        for name in self.names:
            home, _, index = name.partition("@")[2].partition("#")
            remote = self._nodes[home].address != own
            if device_of(name) == "cpu":
                budget = int(seen[home]["ram"] * RAM_SHARE) if remote else ram
                budget //= sharing[self._nodes[home].address]
                devices.append(Device(name, "cpu", budget, host=not remote, remote=remote))
            else:
                free = int(seen[home]["vram"][int(index)] * VRAM_SHARE)
                devices.append(Device(name, "cuda", free, remote=remote))
        return Machine(tuple(devices), ram)

    def start(self, names: Sequence[str], configs: Sequence[StageConfig]) -> None:
        """Actors start when they are connected to."""

    def connect(self, name: str, config: StageConfig, fingerprint: str) -> Stage:
        maker = ActorMaker(partial(self._start_actor, name, config), START_SECONDS)
        return RayStage(name.partition("@")[2], config.terms(fingerprint), maker)

    def stop(self) -> None:
        ray.shutdown()

    def _start_actor(self, name: str, config: StageConfig) -> Any:
        node = self._nodes[name.partition("@")[2].partition("#")[0]]
        gpu = device_of(name) != "cpu"
        # Soft: when the node is gone, any other with room takes the span.
        where = NodeAffinitySchedulingStrategy(node.id, soft=True)
        actor = ray.remote(StageActor).options(num_cpus=1, num_gpus=int(gpu), scheduling_strategy=where)
        return actor.remote(__version__, self._model, asdict(config), self._threads)

    def _ask(self, node: RayNode) -> dict[str, Any]:
        where = NodeAffinitySchedulingStrategy(node.id, soft=False)
        look = ray.remote(look_around).options(num_cpus=0, num_gpus=node.gpus, scheduling_strategy=where)
        seen: dict[str, Any] = ray.get(look.remote(), timeout=60)
        return seen

    def _name_devices(self) -> list[str]:
        """'cuda:0@node#1' is the second GPU of a node: its actor sees that one alone, as the first."""
        gpus = [f"cuda:0@{name}#{i}" for name, node in self._nodes.items() for i in range(node.gpus)]
        names = gpus or [f"cpu@{name}" for name, node in self._nodes.items() if node.cpus]
        if not names:
            raise BadConfig("--ray: the cluster has neither GPUs nor CPUs to offer")
        return names


def _nodes() -> list[RayNode]:
    alive = [node for node in ray.nodes() if node["Alive"]]
    found = [
        RayNode(
            node["NodeID"],
            node["NodeManagerAddress"],
            int(node["Resources"].get("CPU", 0)),
            int(node["Resources"].get("GPU", 0)),
        )
        for node in alive
    ]
    return sorted(found, key=lambda node: (node.address, node.id))
