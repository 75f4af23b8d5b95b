"""Servers and remote stages of paper for one test."""

from __future__ import annotations

from pathlib import Path

from rekindle.shards import Deadlines, HeadKeys, RemoteStage, ShardKeys, ShardServer, shared_keys
from support.paper_shard import PaperStage, paper_server, terms

QUICK = Deadlines(connect=20, call=20, ping=0.1, silence=10)


class Hall:
    """Servers and remote stages of one test, stopped in the right order after it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pair = shared_keys(folder / "link.key")  # of both ends of tcp, unless a test names others
        self._servers: list[ShardServer] = []
        self._remotes: list[RemoteStage] = []

    def address(self, transport: str, name: str = "shard") -> str:
        return "tcp://127.0.0.1:*" if transport == "tcp" else f"ipc://{self.folder}/{name}"

    def serve(
        self, stage: PaperStage, transport: str = "ipc", lease: float = 60, keys: ShardKeys | None = None
    ) -> ShardServer:
        if transport == "tcp" and keys is None:
            keys = ShardKeys(self.pair, frozenset({self.pair.public}))
        server = paper_server(
            self.address(transport, f"shard{len(self._servers)}"), {"paper": stage}, lease=lease, keys=keys
        )
        server.start()
        self._servers.append(server)
        return server

    def connect(
        self, server: ShardServer, stage: PaperStage, deadlines: Deadlines = QUICK, keys: HeadKeys | None = None
    ) -> RemoteStage:
        if keys is None and server.endpoint.startswith("tcp://"):
            keys = HeadKeys(self.pair, self.pair.public)
        remote = RemoteStage(server.endpoint, "paper", terms(stage.span), deadlines=deadlines, keys=keys)
        self._remotes.append(remote)
        return remote

    def remote(self, stage: PaperStage, transport: str = "ipc") -> RemoteStage:
        return self.connect(self.serve(stage, transport), stage)

    def close(self) -> None:
        for remote in self._remotes:
            remote.stop()
        for server in self._servers:
            server.stop()
