"""Throw damaged frames at the import side and at a real shard.

    python scripts/fuzz_frames.py [--frames 10000] [--seed 1]

Every frame must be read or refused with BadFrame (or LinkRefused, where it claims another version): no other
exception, no hang, no memory beyond the message itself; the shard answers with an error of our tree. Afterwards it
must still serve an honest head.
The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Sequence
from typing import get_args

import msgspec
import torch
import zmq

from rekindle import errors
from rekindle.batch import Batch, Segment
from rekindle.errors import BadFrame, LinkRefused
from rekindle.shards import Limits, RemoteStage, ShardServer, Terms, frames
from rekindle.shards.frames import Frame
from rekindle.shards.link import REPLIES, REQUESTS, new_session
from rekindle.shards.parts import export_parts, import_parts
from rekindle.snapshots.types import Page, Part
from rekindle.spec import PAGE, Span
from rekindle.stages.types import PageCount, PendingTokens, StageOutput

LIMITS = Limits(header=1 << 18, frame=1 << 24)
ROOM = 1 << 20  # bytes that reading one frame may take beside its tensors
HIDDEN, VOCABULARY = 8, 16


class EchoStage:
    """Takes what it is given, and keeps nothing."""

    span, slots, device = Span(1, 3), 2, "cpu"

    def forward(self, batch: Batch, hidden: torch.Tensor | None, pending: PendingTokens | None = None) -> StageOutput:
        return StageOutput(hidden, None)

    def open(self, slot: int) -> None: ...
    def close(self, slot: int) -> None: ...
    def restore(self, slot: int, position: int, parts: Sequence[Part]) -> None: ...
    def rewind(self, slot: int, position: int) -> None: ...
    def stop(self) -> None: ...

    def capture(self, slot: int) -> Sequence[Part]:
        return honest_parts()

    def pages(self) -> PageCount:
        return PageCount(1, 0, 1)


def honest_parts() -> list[Part]:
    pages = tuple(Page(torch.zeros(2, PAGE, 1, 4, dtype=torch.bfloat16)) for _ in range(2))
    kv = Part(1, {"tail": torch.zeros(2, 3, 1, 4, dtype=torch.bfloat16)}, pages)
    return [kv, Part(2, {"state": torch.zeros(2, 2, 2), "window": torch.zeros(3, 4)})]


def honest_messages() -> list[list[bytes]]:
    """Of every kind one."""
    exported = export_parts(honest_parts(), {})
    forward = frames.export_batch(Batch((Segment(0, 0, (1, 2, 3)),)))
    pages = frames.PagesEntry(1, 0, 1)
    honest = [
        Frame(1, frames.Hello("echo", "fuzz", 1, 3, "float32", "bfloat16", 2)),
        Frame(2, frames.Prepare(0, 2 * PAGE + 3, exported.entries), exported.tensors),
        Frame(3, forward, {"hidden": torch.zeros(3, HIDDEN)}),
        Frame(4, frames.Capture(0, 0)),
        Frame(5, frames.Commit(0)),
        Frame(6, frames.Ping()),
        Frame(7, frames.Output(pages, (0,)), {"logits": torch.zeros(1, 16)}),
        Frame(8, frames.Failed("StageLost", "gone")),
        Frame(9, frames.Welcome(2, "cpu", 10.0)),
        Frame(10, frames.Refused("held by another head", True)),
        Frame(11, frames.Pong()),
        Frame(12, frames.Goodbye()),
        Frame(13, frames.Open(0)),
        Frame(14, frames.Close(0)),
        Frame(15, frames.Rewind(0, 0)),
        Frame(16, frames.Captured(exported.entries, pages), exported.tensors),
        Frame(17, frames.Abort(0)),
        Frame(18, frames.Pages()),
        Frame(19, frames.Done(pages)),
    ]
    assert {type(frame.body) for frame in honest} == set(get_args(frames.AnyBody)), "a kind of frame is left out"
    return [[bytes(part) for part in frames.export_frame(frame, LIMITS)] for frame in honest]


# Ways to damage a message


def flip_bytes(parts: list[bytes], dice: random.Random) -> list[bytes]:
    header = bytearray(parts[0])
    for _ in range(dice.randint(1, 6)):
        header[dice.randrange(len(header))] = dice.randrange(256)
    return [bytes(header), *parts[1:]]


def cut(parts: list[bytes], dice: random.Random) -> list[bytes]:
    at = dice.randrange(len(parts))
    return [*parts[:at], parts[at][: dice.randrange(len(parts[at]) + 1)], *parts[at + 1 :]]


def drop_or_add(parts: list[bytes], dice: random.Random) -> list[bytes]:
    if len(parts) > 1 and dice.random() < 0.5:
        at = dice.randrange(1, len(parts))
        return parts[:at] + parts[at + 1 :]
    return [*parts, dice.randbytes(dice.randrange(64))]


def shuffle(parts: list[bytes], dice: random.Random) -> list[bytes]:
    return dice.sample(parts, len(parts))


def noise(parts: list[bytes], dice: random.Random) -> list[bytes]:
    prefix = dice.choice([b"", frames.MAGIC, frames.MAGIC + bytes([frames.VERSION])])
    return [prefix + dice.randbytes(dice.randrange(200)), *parts[1:]]


def lie_in_the_table(parts: list[bytes], dice: random.Random) -> list[bytes]:
    """A well-formed header whose numbers are wrong, large or absurd."""
    prefix = len(frames.MAGIC) + 1
    header = msgspec.msgpack.decode(parts[0][prefix:])
    table = header[2] or [["x", "float32", [1], 4]]
    entry = dice.choice(table)
    absurd = dice.choice([-1, 0, 1, 1 << 31, 1 << 40, (1 << 63) - 1, 2**64 - 1, 1.5, None, "8"])
    field = dice.randrange(4)
    entry[field] = [absurd] * dice.randrange(10) if field == 2 else absurd
    header[2] = table
    return [parts[0][:prefix] + msgspec.msgpack.encode(header), *parts[1:]]


ABSURD = [-1, 0, 1, 1 << 31, 1 << 32, (1 << 48) - 1, 1 << 48, 2**64 - 1, 1.5, None, "8", b"", [], {}]


def lie_in_the_body(parts: list[bytes], dice: random.Random) -> list[bytes]:
    """A well-formed header, one of whose fields is wrong, large or absurd, however deep it stands."""
    prefix = len(frames.MAGIC) + 1
    header = msgspec.msgpack.decode(parts[0][prefix:])
    place, at = header, dice.randrange(2)
    while isinstance(place[at], list) and place[at] and dice.random() < 0.9:
        place, at = place[at], dice.randrange(len(place[at]))
    place[at] = dice.choice(ABSURD)
    return [parts[0][:prefix] + msgspec.msgpack.encode(header), *parts[1:]]


def nest_deeply(parts: list[bytes], dice: random.Random) -> list[bytes]:
    return [parts[0][:3] + b"\x91" * dice.randrange(1, 100_000), *parts[1:]]


def claim_long_arrays(parts: list[bytes], dice: random.Random) -> list[bytes]:
    """msgpack lengths of four bytes, with nothing behind them."""
    claim = dice.choice([b"\xdd", b"\xdf", b"\xdb", b"\xc6"]) + dice.randbytes(4)
    at = dice.randrange(3, len(parts[0]) + 1)
    return [parts[0][:at] + claim + parts[0][at:], *parts[1:]]


DAMAGES: list[Callable[[list[bytes], random.Random], list[bytes]]] = [
    flip_bytes,
    cut,
    drop_or_add,
    shuffle,
    noise,
    lie_in_the_table,
    lie_in_the_body,
    nest_deeply,
    claim_long_arrays,
]


def read_all(messages: Sequence[list[bytes]]) -> dict[str, int]:
    counts = {"read": 0, "refused": 0, "peak": 0}
    tracemalloc.start()
    for parts in messages:
        received = [zmq.Frame(part) for part in parts]
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        try:
            frame = frames.import_frame(received, LIMITS)
            taken = sum(tensor.untyped_storage().nbytes() for tensor in frame.tensors.values())
            assert taken <= sum(map(len, parts)), f"tensors of {taken} bytes out of a message of {sum(map(len, parts))}"
            if isinstance(frame.body, frames.Prepare | frames.Captured):
                import_parts(frame.body.parts, frame.tensors, {})
            counts["read"] += 1
        except (BadFrame, LinkRefused):
            counts["refused"] += 1
        peak = tracemalloc.get_traced_memory()[1] - before
        counts["peak"] = max(counts["peak"], peak)
        assert peak < ROOM, f"reading a frame took {peak} bytes"
    tracemalloc.stop()
    return counts


def throw_all(messages: Sequence[list[bytes]], endpoint: str) -> None:
    """Under a session that the shard knows, so that the frames reach the stage's worker too."""
    session = new_session()
    with zmq.Context() as context, context.socket(zmq.DEALER) as requests, context.socket(zmq.DEALER) as replies:
        for socket, letter in ((requests, REQUESTS), (replies, REPLIES)):
            socket.setsockopt(zmq.IDENTITY, session + letter)
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.connect(endpoint)
        replies.send_multipart(honest_messages()[0])
        assert replies.poll(10_000), "the shard does not greet"
        for parts in messages:
            if not is_goodbye(parts):  # after which the shard would listen to nothing more
                requests.send_multipart(parts)
        requests.send_multipart([bytes(part) for part in frames.export_frame(Frame(999_999, frames.Goodbye()), LIMITS)])
        until = time.monotonic() + 120
        while time.monotonic() < until:
            assert replies.poll(20_000), "the shard does not answer any more"
            header = frames.import_header(replies.recv_multipart(copy=False), LIMITS)
            if isinstance(header.body, frames.Failed):
                assert hasattr(errors, header.body.error), f"not refused but broken: {header.body}"
            if header.id == 999_999:
                return
    raise AssertionError("the shard never said goodbye")


def is_goodbye(parts: list[bytes]) -> bool:
    try:
        return isinstance(frames.import_header([zmq.Frame(part) for part in parts], LIMITS).body, frames.Goodbye)
    except (BadFrame, LinkRefused):
        return False


def serve_honestly(endpoint: str) -> None:
    stage = RemoteStage(endpoint, "echo", Terms("fuzz", EchoStage.span, "float32", "bfloat16", 2), limits=LIMITS)
    hidden = torch.randn(2, HIDDEN)
    stage.open(0)
    assert torch.equal(stage.forward(Batch((Segment(0, 0, (1, 2)),)), hidden).hidden, hidden), "the echo is wrong"
    stage.restore(0, 2 * PAGE + 3, stage.capture(0))
    stage.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frames", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    wishes = parser.parse_args()
    logging.disable(logging.WARNING)  # the shard would tell of each frame
    dice = random.Random(wishes.seed)
    honest = honest_messages()
    damaged = [dice.choice(DAMAGES)(list(dice.choice(honest)), dice) for _ in range(wishes.frames)]
    begin = time.perf_counter()
    counts = read_all(damaged)
    with tempfile.TemporaryDirectory() as folder:
        server = ShardServer(
            {"echo": EchoStage()},
            f"ipc://{folder}/echo",
            fingerprint="fuzz",
            hidden_dtype="float32",
            kv_dtype="bfloat16",
            vocabulary=VOCABULARY,
            limits=LIMITS,
        )
        server.start()
        throw_all(damaged, server.endpoint)
        serve_honestly(server.endpoint)
        server.stop()
    seconds = round(time.perf_counter() - begin, 1)
    print("{refused} refused, {read} read, at most {peak} bytes each; the shard still serves".format(**counts))
    print(json.dumps({"frames": wishes.frames, "seed": wishes.seed, "seconds": seconds, **counts}))


if __name__ == "__main__":
    main()
