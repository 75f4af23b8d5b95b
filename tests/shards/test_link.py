"""Who may talk to whom."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import zmq
from support.paper_hall import QUICK, Hall
from support.paper_shard import PaperStage, terms

from rekindle.batch import Batch, Segment
from rekindle.errors import BadConfig, LinkRefused, RekindleError
from rekindle.shards import (
    HeadKeys,
    KeyPair,
    RemoteStage,
    ShardKeys,
    frames,
    keygen,
    load_keys,
    load_public,
    shared_keys,
)
from rekindle.shards.frames import Frame, Limits
from rekindle.shards.link import check_endpoint
from rekindle.spec import Span

SPAN = Span(0, 4)
SOON = replace(QUICK, connect=1.5)


@dataclass(frozen=True)
class Ring:
    shard: KeyPair
    head: KeyPair
    stranger: KeyPair


@pytest.fixture
def ring(tmp_path: Path) -> Ring:
    return Ring(*(keygen(tmp_path / name) for name in ("shard.key", "head.key", "stranger.key")))


@pytest.fixture
def locked(hall: Hall, ring: Ring) -> str:
    """A shard that allows one head."""
    return hall.serve(PaperStage(SPAN, 8), "tcp", keys=ShardKeys(ring.shard, frozenset({ring.head.public}))).endpoint


def connect(endpoint: str, keys: HeadKeys | None) -> RemoteStage:
    return RemoteStage(endpoint, "paper", terms(SPAN), deadlines=SOON, keys=keys)


# Keys


def test_a_secret_key_is_written_for_its_owner_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        pair = keygen(tmp_path / "key")
    finally:
        os.umask(before)
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600
    assert load_keys(tmp_path / "key") == pair
    assert load_public(tmp_path / "key.pub") == pair.public
    assert pair.secret not in (tmp_path / "key.pub").read_text()
    assert pair.secret not in repr(pair)


def test_a_key_is_never_overwritten(tmp_path: Path) -> None:
    keygen(tmp_path / "key")
    with pytest.raises(FileExistsError):
        keygen(tmp_path / "key")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o666])
def test_a_secret_key_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    keygen(tmp_path / "key")
    (tmp_path / "key").chmod(mode)
    with pytest.raises(BadConfig, match=f"mode {mode:04o}, expected 0600"):
        load_keys(tmp_path / "key")


def test_a_damaged_key_file_is_refused(tmp_path: Path, ring: Ring) -> None:
    path = tmp_path / "key"
    path.touch(0o600)
    for text, says in [
        ("", "0 entries"),
        ("short short", "40 characters, found 5"),
        (f"{ring.head.public} {ring.shard.secret}", "does not belong"),
    ]:
        path.write_text(text)
        with pytest.raises(BadConfig, match=says):
            load_keys(path)


@pytest.mark.parametrize("load", [load_keys, load_public])
def test_a_key_file_that_is_none_is_refused_in_one_sentence(tmp_path: Path, load: Callable[[Path], object]) -> None:
    path = tmp_path / "key"
    with pytest.raises(BadConfig, match="cannot be read: No such file"):
        load(path)
    path.touch(0o600)
    for data, says in [
        (b"\xff" * 40, "no text"),
        (("\x01" * 40 + " " + "\x02" * 40).encode(), "no character of a key|40 characters"),
        (b"x" * 100_000, "entries|40 characters"),
    ]:
        path.write_bytes(data)
        with pytest.raises(BadConfig, match=says):
            load(path)


# The key pair of one user's links


def test_both_ends_of_one_user_find_the_same_keys_whoever_comes_first(tmp_path: Path) -> None:
    path = tmp_path / "new" / "link.key"
    with ThreadPoolExecutor(8) as pool:
        pairs = set(pool.map(lambda _: shared_keys(path), range(8)))
    assert len(pairs) == 1
    assert [entry.name for entry in path.parent.iterdir()] == ["link.key"]
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700


def test_shared_keys_of_another_user_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "link.key"
    shared_keys(path)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(BadConfig, match="belongs to user"):
        shared_keys(path)


def test_another_user_reads_no_shared_keys(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root becomes another user")
    path = tmp_path / "link.key"
    shared_keys(path)
    for folder in (tmp_path, *tmp_path.parents):
        if str(folder).startswith(tempfile.gettempdir() + "/"):
            folder.chmod(0o755)  # not the folders keep it from them
    code = "import os, sys; os.setgroups([]); os.setgid(65534); os.setuid(65534); open(sys.argv[1]).read()"
    ran = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, timeout=30)
    assert ran.returncode == 1
    assert "PermissionError" in ran.stderr


# Addresses


@pytest.mark.parametrize(
    "endpoint", ["tcp://10.0.0.5:9000", "tcp://*:9000", "tcp://0.0.0.0:9000", "tcp://[::]:9000", "tcp://example.org:1"]
)
def test_plain_tcp_that_leaves_the_host_is_refused_on_both_ends(hall: Hall, endpoint: str) -> None:
    with pytest.raises(LinkRefused, match=r"leaves this host .* keys"):
        connect(endpoint, None)
    hall.address = lambda *_: endpoint  # type: ignore[method-assign]
    with pytest.raises(LinkRefused, match=r"leaves this host .* keys"):
        hall.serve(PaperStage(SPAN, 8))


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:9", "tcp://localhost:9", "tcp://[::1]:9"])
def test_loopback_without_keys_is_refused_too_since_every_user_can_reach_it(endpoint: str) -> None:
    check_endpoint(endpoint, encrypted=True)
    with pytest.raises(LinkRefused, match="every user of this host can reach and the link has no keys"):
        check_endpoint(endpoint, encrypted=False)


def test_a_socket_file_needs_no_keys() -> None:
    check_endpoint("ipc:///tmp/x", encrypted=False)


@pytest.mark.parametrize(
    "endpoint", ["", "udp://127.0.0.1:9", "tcp://127.0.0.1", "ipc://", "127.0.0.1:9", "ipc://" + "x" * 200]
)
def test_what_is_no_address_is_refused(endpoint: str) -> None:
    with pytest.raises(LinkRefused):
        check_endpoint(endpoint, encrypted=True)


def test_an_address_in_use_is_reported(hall: Hall) -> None:
    taken = hall.serve(PaperStage(SPAN, 8), "tcp").endpoint
    hall.address = lambda *_: taken  # type: ignore[method-assign]
    with pytest.raises(LinkRefused, match=f"cannot listen on {taken}"):
        hall.serve(PaperStage(SPAN, 8), "tcp")


def test_an_ipc_socket_is_for_its_owner_alone(hall: Hall) -> None:
    before = os.umask(0)
    try:
        endpoint = hall.serve(PaperStage(SPAN, 8)).endpoint
        assert os.umask(0) == 0, "the umask is what it was"
    finally:
        os.umask(before)
    assert Path(endpoint.removeprefix("ipc://")).stat().st_mode & 0o777 == 0o600


def test_a_file_in_the_place_of_a_socket_is_not_deleted(hall: Hall, tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("dear")
    hall.address = lambda *_: f"ipc://{tmp_path}/precious"  # type: ignore[method-assign]
    with pytest.raises(LinkRefused, match="no socket lies there"):
        hall.serve(PaperStage(SPAN, 8))
    assert (tmp_path / "precious").read_text() == "dear"


# CURVE


def test_the_right_keys_open_the_link(locked: str, ring: Ring) -> None:
    remote = connect(locked, HeadKeys(ring.head, ring.shard.public))
    remote.open(0)
    assert remote.forward(Batch((Segment(0, 0, (1, 2)),)), None).hidden is not None
    remote.stop()


def test_a_key_that_is_not_allowed_gets_nothing(locked: str, ring: Ring) -> None:
    with pytest.raises(LinkRefused, match="does not allow this head's key"):
        connect(locked, HeadKeys(ring.stranger, ring.shard.public))


def test_a_connection_without_keys_gets_nothing(locked: str) -> None:
    """Not through our own code, which refuses to try."""
    hello = frames.export_frame(Frame(0, frames.Hello("paper", "x", 0, 4, "float32", "bf16", 1)), Limits())
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.IDENTITY, b"s" * 16 + b"r")
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(locked)
        socket.send_multipart(hello)
        assert not socket.poll(1000)
    with pytest.raises(LinkRefused, match="has no keys"):
        connect(locked, None)


def test_a_head_that_takes_the_shard_for_another_gets_nothing(locked: str, ring: Ring) -> None:
    with pytest.raises(LinkRefused, match="is this the shard's key"):
        connect(locked, HeadKeys(ring.head, ring.stranger.public))


def test_a_head_with_keys_does_not_talk_to_whoever_took_the_shards_port(ring: Ring) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as squatter:
        port = squatter.bind_to_random_port("tcp://127.0.0.1")
        with pytest.raises(LinkRefused, match="do both ends have keys"):
            connect(f"tcp://127.0.0.1:{port}", HeadKeys(ring.head, ring.shard.public))


def test_strangers_do_not_disturb_the_head_that_is_allowed(locked: str, ring: Ring) -> None:
    remote = connect(locked, HeadKeys(ring.head, ring.shard.public))
    for keys in (None, HeadKeys(ring.stranger, ring.shard.public)):
        with pytest.raises(RekindleError):
            RemoteStage(locked, "paper", terms(SPAN), deadlines=replace(QUICK, connect=0.3), keys=keys)
    remote.open(0)
    remote.stop()


# Garbage on the wire


def test_a_shard_survives_whoever_throws_garbage_at_it(hall: Hall) -> None:
    server = hall.serve(PaperStage(SPAN, 8))
    remote = hall.connect(server, PaperStage(SPAN, 8))
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 1000)
        socket.connect(server.endpoint)
        for message in ([b""], [b"rk"], [b"rk\x01"], [b"rk\x02zzz"], [b"rk\x01\xff" * 9, b"x"], [bytes(9)] * 50):
            socket.send_multipart(message)
        assert socket.poll(5000)  # the one that speaks another version is told so
    remote.open(0)
    assert remote.forward(Batch((Segment(0, 0, (1, 2)),)), None).hidden is not None


# Two hosts


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=10)


@pytest.fixture
def two_hosts() -> Iterator[tuple[str, str]]:
    """Two network namespaces joined by a cable; the shard's side has the address 10.77.0.1."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("network namespaces need iproute2 and root")
    names = f"rk{os.getpid()}a", f"rk{os.getpid()}b"
    try:
        ip("netns", "add", names[0])
    except subprocess.CalledProcessError as error:
        pytest.skip(f"network namespaces are not permitted here: {error.stderr.decode().strip()}")
    try:
        ip("netns", "add", names[1])
        ip("link", "add", names[0], "netns", names[0], "type", "veth", "peer", "name", names[1], "netns", names[1])
        for name, address in zip(names, ("10.77.0.1/24", "10.77.0.2/24"), strict=True):
            ip("-n", name, "addr", "add", address, "dev", name)
            ip("-n", name, "link", "set", name, "up")
        yield names
    except subprocess.CalledProcessError as error:
        pytest.skip(f"virtual cables are not permitted here: {error.stderr.decode().strip()}")
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True, timeout=10)


HEAD = """
import sys
from pathlib import Path
from support.paper_shard import terms
from rekindle.batch import Batch, Segment
from rekindle.shards import Deadlines, HeadKeys, RemoteStage, load_keys, load_public
from rekindle.spec import Span
keys = HeadKeys(load_keys(Path(sys.argv[2])), load_public(Path(sys.argv[3])))
deadlines = Deadlines(connect=float(sys.argv[4]))
remote = RemoteStage(sys.argv[1], "paper", terms(Span(0, 4)), keys=keys, deadlines=deadlines)
remote.open(0)
remote.forward(Batch((Segment(0, 0, tuple(range(200))),)), None)
parts = remote.capture(0)
remote.open(1)
remote.restore(1, 200, parts)
assert remote.pages().used == 8
remote.stop()
print("both slots stand at 200")
"""


@pytest.mark.slow
def test_two_hosts_are_joined_by_tcp_with_keys(two_hosts: tuple[str, str], tmp_path: Path, ring: Ring) -> None:
    endpoint = "tcp://10.77.0.1:9077"
    there = ["ip", "netns", "exec", two_hosts[0], sys.executable, "-m", "support.paper_shard", endpoint]
    there += ["--keys", str(tmp_path / "shard.key"), "--allow", str(tmp_path / "head.key.pub")]
    here = ["ip", "netns", "exec", two_hosts[1], sys.executable, "-c", HEAD, endpoint]
    with subprocess.Popen(there, stdout=subprocess.PIPE, text=True) as shard:
        try:
            assert shard.stdout is not None
            assert shard.stdout.readline().strip() == f"rekindle-shard ready {endpoint}"
            allowed = [*here, str(tmp_path / "head.key"), str(tmp_path / "shard.key.pub"), "20"]
            done = subprocess.run(allowed, check=True, capture_output=True, text=True, timeout=60)
            assert "both slots stand at 200" in done.stdout
            strange = [*here, str(tmp_path / "stranger.key"), str(tmp_path / "shard.key.pub"), "20"]
            begin = time.monotonic()
            refused = subprocess.run(strange, check=False, capture_output=True, text=True, timeout=60)
            assert refused.returncode != 0
            assert "does not allow this head's key" in refused.stderr
            assert time.monotonic() - begin < 20
        finally:
            shard.terminate()
