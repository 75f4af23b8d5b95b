"""Servers and remote stages of paper for one test."""

from __future__ import annotations

from pathlib import Path

from paper_shard import PaperStage, paper_server, terms

from rekindle.shards import Deadlines, HeadKeys, RemoteStage, ShardKeys, ShardServer

QUICK = Deadlines(connect=20, call=20, ping=0.1, silence=10)


class Hall:
    """Servers and remote stages of one test, stopped in the right order after it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._servers: list[ShardServer] = []
        self._remotes: list[RemoteStage] = []

    def address(self, transport: str, name: str = "shard") -> str:
        return "tcp://127.0.0.1:*" if transport == "tcp" else f"ipc://{self.folder}/{name}"

    def serve(
        self, stage: PaperStage, transport: str = "ipc", lease: float = 60, keys: ShardKeys | None = None
    ) -> ShardServer:
        server = paper_server(
            self.address(transport, f"shard{len(self._servers)}"), {"paper": stage}, lease=lease, keys=keys
        )
        server.start()
        self._servers.append(server)
        return server

    def connect(
        self, server: ShardServer, stage: PaperStage, deadlines: Deadlines = QUICK, keys: HeadKeys | None = None
    ) -> RemoteStage:
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
