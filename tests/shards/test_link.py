"""Who may talk to whom."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import zmq
from paper_hall import QUICK, Hall
from paper_shard import PaperStage, terms

from rekindle.batch import Batch, Segment
from rekindle.errors import BadConfig, LinkRefused, RekindleError
from rekindle.shards import HeadKeys, KeyPair, RemoteStage, ShardKeys, keygen, load_keys, load_public
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


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:9", "tcp://localhost:9", "tcp://[::1]:9", "ipc:///tmp/x"])
def test_loopback_and_ipc_need_no_keys(endpoint: str) -> None:
    check_endpoint(endpoint, encrypted=False)


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
        hall.serve(PaperStage(SPAN, 8))


def test_an_ipc_socket_is_for_its_owner_alone(hall: Hall) -> None:
    endpoint = hall.serve(PaperStage(SPAN, 8)).endpoint
    assert Path(endpoint.removeprefix("ipc://")).stat().st_mode & 0o777 == 0o600


# CURVE


def test_the_right_keys_open_the_link(locked: str, ring: Ring) -> None:
    remote = connect(locked, HeadKeys(ring.head, ring.shard.public))
    remote.open(0)
    assert remote.forward(Batch((Segment(0, 0, (1, 2)),)), None).hidden is not None
    remote.stop()


def test_a_key_that_is_not_allowed_gets_nothing(locked: str, ring: Ring) -> None:
    with pytest.raises(LinkRefused, match="does not allow this head's key"):
        connect(locked, HeadKeys(ring.stranger, ring.shard.public))


def test_a_head_without_keys_gets_nothing(locked: str) -> None:
    with pytest.raises(LinkRefused, match=r"no answer to hello within \d\.\d s: .*do both ends have keys"):
        connect(locked, None)


def test_a_head_that_takes_the_shard_for_another_gets_nothing(locked: str, ring: Ring) -> None:
    with pytest.raises(LinkRefused, match="is this the shard's key"):
        connect(locked, HeadKeys(ring.head, ring.stranger.public))


def test_a_head_with_keys_does_not_talk_to_a_shard_without(hall: Hall, ring: Ring) -> None:
    plain = hall.serve(PaperStage(SPAN, 8), "tcp").endpoint
    with pytest.raises(LinkRefused, match="do both ends have keys"):
        connect(plain, HeadKeys(ring.head, ring.shard.public))


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
sys.path.insert(0, sys.argv[1])
from paper_shard import terms
from rekindle.batch import Batch, Segment
from rekindle.shards import Deadlines, HeadKeys, RemoteStage, load_keys, load_public
from rekindle.spec import Span
keys = HeadKeys(load_keys(Path(sys.argv[3])), load_public(Path(sys.argv[4])))
deadlines = Deadlines(connect=float(sys.argv[5]))
remote = RemoteStage(sys.argv[2], "paper", terms(Span(0, 4)), keys=keys, deadlines=deadlines)
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
    folder = str(Path(__file__).parent)
    endpoint = "tcp://10.77.0.1:9077"
    there = ["ip", "netns", "exec", two_hosts[0], sys.executable, f"{folder}/paper_shard.py", endpoint]
    there += ["--keys", str(tmp_path / "shard.key"), "--allow", str(tmp_path / "head.key.pub")]
    here = ["ip", "netns", "exec", two_hosts[1], sys.executable, "-c", HEAD, folder, endpoint]
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
