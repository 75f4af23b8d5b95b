"""The same stage in another process or on another machine."""

from rekindle.shards.client import RemoteStage
from rekindle.shards.frames import Frame, Limits
from rekindle.shards.link import HeadKeys, KeyPair, ShardKeys, is_loopback, keygen, load_keys, load_public, shared_keys
from rekindle.shards.process import ShardKeeper, ShardProcess, serve_forever, start_shard
from rekindle.shards.server import ShardServer
from rekindle.shards.session import Deadlines, Pending
from rekindle.shards.terms import Terms

__all__ = [
    "Deadlines",
    "Frame",
    "HeadKeys",
    "KeyPair",
    "Limits",
    "Pending",
    "RemoteStage",
    "ShardKeeper",
    "ShardKeys",
    "ShardProcess",
    "ShardServer",
    "Terms",
    "is_loopback",
    "keygen",
    "load_keys",
    "load_public",
    "serve_forever",
    "shared_keys",
    "start_shard",
]
