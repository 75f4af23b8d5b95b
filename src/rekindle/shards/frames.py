"""One message of a link: a small readable header and the raw bytes of its tensors, each in a message part of its own.

    part 0    b"rk", the frame version (one byte), then msgpack: id, body (its kind and fields), tensor table
    part 1..  the bytes of each tensor of the table, in order

Nothing here can run code, and nothing is allocated or interpreted before the header has been compared with the bytes
that came. The export side hands out views of long tensors, the import side makes tensors that view the message.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeAlias

import msgspec
import torch
import zmq

from rekindle.batch import Batch, Segment, Wanted
from rekindle.errors import BadFrame, LinkRefused

VERSION = 4
MAGIC = b"rk"

# What may travel. Quantised rows of KV are bytes.
DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "uint8": torch.uint8,
    "int8": torch.int8,
    "int32": torch.int32,
    "int64": torch.int64,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

MAX_TENSORS = 4096  # tensors of one frame: three per layer, and some room
MAX_DIMS = 8
MAX_TAPS = 256  # layers whose outputs a drafter reads
SHORT = 1 << 16  # bytes up to which a copy costs less than a view that has to be kept track of

Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=1 << 48)]
TokenId: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
Text: TypeAlias = Annotated[str, msgspec.Meta(max_length=1 << 16)]
Name: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]


@dataclass(frozen=True, slots=True)
class Limits:
    """The most bytes that a frame may bring."""

    header: int = 16 << 20
    frame: int = 16 << 30  # a long sequence of a large model: its pages come in one frame


# Bodies: what a frame asks or answers. The kind on the wire is the lower-case name.


class FrameBody(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=str.lower):
    """The fields of one kind of frame."""


class Hello(FrameBody, frozen=True):
    """The head says what it expects, and what it planned with. `replaces` names its lost session, whose slots may be
    closed at once."""

    stage: Name
    fingerprint: Text
    start: Count
    stop: Count
    hidden_dtype: Name
    kv_dtype: Name
    slots: Count
    replaces: Annotated[bytes, msgspec.Meta(max_length=64)] = b""
    pages: Count = 0  # of one sequence at the context limit
    rewind_rows: Count = 0  # of the longest block that is verified


class Welcome(FrameBody, frozen=True):
    slots: Count
    device: Name
    lease: float  # seconds without a sign of life after which the shard closes the head's slots


class Refused(FrameBody, frozen=True):
    message: Text
    passing: bool = False  # asking again later may help


class Ping(FrameBody, frozen=True):
    pass


class Pong(FrameBody, frozen=True):
    pass


class Goodbye(FrameBody, frozen=True):
    pass


class SegmentEntry(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    slot: Count
    position: Count
    tokens: Annotated[tuple[TokenId, ...], msgspec.Meta(min_length=1)]
    wanted: Wanted
    top: Count = 0
    features: Count = 0


class Forward(FrameBody, frozen=True):
    """With the tensor `hidden`, unless the stage is the first."""

    segments: Annotated[tuple[SegmentEntry, ...], msgspec.Meta(min_length=1)]
    rewindable: bool
    taps: Annotated[tuple[Count, ...], msgspec.Meta(max_length=MAX_TAPS)] = ()


class PagesEntry(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    free: Count
    used: Count
    total: Count


class Output(FrameBody, frozen=True):
    """With the tensor `hidden`, or with `logits` and `scores` as far as they were wanted; with `features` [taps of the
    stage, rows, hidden] where it has some of the batch's taps.

    Whatever may have changed the stage's pages answers with their count: the head then never has to wait for it.
    """

    pages: PagesEntry
    skipping: tuple[Count, ...] = ()  # slots


class Open(FrameBody, frozen=True):
    slot: Count


class Close(FrameBody, frozen=True):
    slot: Count


class Rewind(FrameBody, frozen=True):
    slot: Count
    position: Count


TensorName: TypeAlias = Annotated[str, msgspec.Meta(pattern="^[a-z][a-z0-9_]{0,31}$")]


class PartEntry(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """With a tensor `<layer>.<name>` for every name and, of a paged layer, the tensor `<layer>/pages`."""

    layer: Count
    names: Annotated[tuple[TensorName, ...], msgspec.Meta(max_length=MAX_TENSORS)]
    kept: Count = 0  # leading pages that the receiver holds already, so they are not sent


PartEntries: TypeAlias = Annotated[tuple[PartEntry, ...], msgspec.Meta(max_length=MAX_TENSORS // 2)]


class Capture(FrameBody, frozen=True):
    """`since` is the id of the capture or prepare after which both ends hold the same pages; 0 for none."""

    slot: Count
    since: Count


class Captured(FrameBody, frozen=True):
    parts: PartEntries
    pages: PagesEntry


class Prepare(FrameBody, frozen=True):
    slot: Count
    position: Count
    parts: PartEntries


class Commit(FrameBody, frozen=True):
    slot: Count


class Abort(FrameBody, frozen=True):
    slot: Count


class Pages(FrameBody, frozen=True):
    pass


class Done(FrameBody, frozen=True):
    pages: PagesEntry


class Failed(FrameBody, frozen=True):
    """An exception of the other end: its class and its message."""

    error: Name
    message: Text


AnyBody: TypeAlias = (
    Hello
    | Welcome
    | Refused
    | Ping
    | Pong
    | Goodbye
    | Forward
    | Output
    | Open
    | Close
    | Rewind
    | Capture
    | Captured
    | Prepare
    | Commit
    | Abort
    | Pages
    | Done
    | Failed
)


class TensorEntry(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    name: Name
    dtype: Name
    shape: Annotated[tuple[Count, ...], msgspec.Meta(max_length=MAX_DIMS)]
    nbytes: Count


class Header(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    id: Count
    body: AnyBody
    tensors: Annotated[tuple[TensorEntry, ...], msgspec.Meta(max_length=MAX_TENSORS)]


@dataclass(frozen=True, slots=True)
class Frame:
    """One message. A reply has the id of its request."""

    id: int
    body: AnyBody
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Header)
_PREFIX = MAGIC + bytes([VERSION])


def export_frame(frame: Frame, limits: Limits) -> list[bytes | memoryview]:
    """The message parts; the tensors must stay as they are until the message has left."""
    table: list[TensorEntry] = []
    buffers: list[bytes | memoryview] = []
    total = 0
    for name, tensor in frame.tensors.items():
        plain = tensor.is_cpu and not tensor.requires_grad and tensor.is_contiguous()
        host = tensor if plain else tensor.detach().cpu().contiguous()
        table.append(TensorEntry(name, _dtype_name(name, host.dtype), tuple(host.shape), host.nbytes))
        buffers.append(_bytes_of(host))
        total += host.nbytes
    header = _PREFIX + _encoder.encode(Header(frame.id, frame.body, tuple(table)))
    _check_sizes(len(header), len(header) + total, limits)
    return [header, *buffers]


def import_frame(parts: Sequence[zmq.Frame], limits: Limits) -> Frame:
    header = import_header(parts, limits)
    return Frame(header.id, header.body, import_tensors(header, parts, limits))


def import_header(parts: Sequence[zmq.Frame], limits: Limits) -> Header:
    """Kind, fields and tensor table of a message, before anything of its tensors is looked at."""
    if not parts:
        raise BadFrame("a frame has a header, this message has no parts")
    raw = parts[0].buffer
    _check_sizes(raw.nbytes, sum(map(len, parts)), limits)
    prefix = raw[: len(_PREFIX)].tobytes()
    if prefix != _PREFIX:
        raise _foreign(prefix)
    try:
        return _decoder.decode(raw[len(_PREFIX) :])
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise BadFrame(f"the header does not read as one of version {VERSION}: {error}") from None


def _foreign(prefix: bytes) -> BadFrame | LinkRefused:
    if len(prefix) < len(_PREFIX) or not prefix.startswith(MAGIC):
        return BadFrame(f"a frame begins with {MAGIC!r}, this message with {prefix[: len(MAGIC)]!r}")
    return LinkRefused(f"the other end speaks frame version {prefix[-1]}, this end version {VERSION}")


def import_tensors(header: Header, parts: Sequence[zmq.Frame], limits: Limits) -> dict[str, torch.Tensor]:
    """Tensors that view the message, by name.

    Those that will be computed on are copied to where torch itself would have put them: vector kernels choose their
    path by alignment, so on the message's memory they could round differently than in a local stage.
    """
    if len(parts) != len(header.tensors) + 1:
        raise BadFrame(f"the header lists {len(header.tensors)} tensors, {len(parts) - 1} parts follow it")
    names = {entry.name for entry in header.tensors}
    if len(names) != len(header.tensors):
        raise BadFrame(f"the header lists {len(header.tensors)} tensors under {len(names)} names")
    for entry, part in zip(header.tensors, parts[1:], strict=True):
        _check_entry(entry, len(part), limits)
    copy = isinstance(header.body, Forward | Output)
    return {
        entry.name: _tensor_of(part, DTYPES[entry.dtype], entry.shape, copy)
        for entry, part in zip(header.tensors, parts[1:], strict=True)
    }


def _check_sizes(header: int, total: int, limits: Limits) -> None:
    if header > limits.header:
        raise BadFrame(f"the header has {header} bytes, the limit is {limits.header}")
    if total > limits.frame:
        raise BadFrame(f"the frame has {total} bytes, the limit is {limits.frame}")


def _check_entry(entry: TensorEntry, length: int, limits: Limits) -> None:
    dtype = DTYPES.get(entry.dtype)
    if dtype is None:
        raise BadFrame(f"tensor {entry.name} has dtype {entry.dtype!r}, known are {', '.join(DTYPES)}")
    by_shape = math.prod(entry.shape) * dtype.itemsize
    if not by_shape == entry.nbytes == length:
        raise BadFrame(
            f"tensor {entry.name}: {entry.dtype} {entry.shape} takes {by_shape} bytes, "
            f"the header says {entry.nbytes}, the part holds {length}"
        )
    # An empty tensor brings no bytes, yet torch computes strides from its other sizes.
    if not length and math.prod(filter(None, entry.shape)) > limits.frame:
        raise BadFrame(f"tensor {entry.name} claims the empty shape {entry.shape}, the limit is {limits.frame} bytes")


def _dtype_name(name: str, dtype: torch.dtype) -> str:
    if dtype not in DTYPE_NAMES:
        raise BadFrame(f"tensor {name} has dtype {dtype}, a link carries {', '.join(DTYPES)}")
    return DTYPE_NAMES[dtype]


def _bytes_of(tensor: torch.Tensor) -> bytes | memoryview:
    """A view of a contiguous host tensor, through int16 where numpy does not know the type; of a short one a copy."""
    if tensor.nbytes < SHORT:
        return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)
    return (tensor.view(torch.int16) if tensor.dtype is torch.bfloat16 else tensor).numpy().data


def _tensor_of(part: zmq.Frame, dtype: torch.dtype, shape: tuple[int, ...], copy: bool) -> torch.Tensor:
    length = len(part)
    if (length < SHORT and copy) or not length:
        tensor = torch.empty(shape, dtype=dtype)
        ctypes.memmove(tensor.data_ptr(), part.bytes, length)
        return tensor
    tensor = torch.frombuffer(part.buffer, dtype=dtype).view(shape)
    # A short message lies somewhere inside a larger receive buffer, possibly at an odd address.
    return tensor.clone() if copy or tensor.data_ptr() % dtype.itemsize else tensor


# Batches


def export_batch(batch: Batch) -> Forward:
    for segment in batch.segments:
        if not 0 <= min(segment.tokens) <= max(segment.tokens) < 1 << 31:
            wrong = next(token for token in segment.tokens if not 0 <= token < 1 << 31)
            raise BadFrame(f"slot {segment.slot}: {wrong} is no token id, which have 31 bits")
    entries = tuple(SegmentEntry(s.slot, s.position, s.tokens, s.wanted, s.top, s.features) for s in batch.segments)
    return Forward(entries, batch.rewindable, batch.taps)


def import_batch(body: Forward) -> Batch:
    slots = [entry.slot for entry in body.segments]
    if len(slots) != len(set(slots)):
        raise BadFrame(f"a batch has at most one segment per slot, this one names slots {slots}")
    for entry in body.segments:
        if entry.features > len(entry.tokens):
            raise BadFrame(f"slot {entry.slot}: features of {entry.features} rows of {len(entry.tokens)} are asked for")
    if list(body.taps) != sorted(set(body.taps)):
        raise BadFrame(f"taps ascend, this batch names {list(body.taps)}")
    segments = tuple(
        Segment(entry.slot, entry.position, entry.tokens, entry.wanted, entry.top, entry.features)
        for entry in body.segments
    )
    return Batch(segments, body.rewindable, body.taps)


def expect(body: Any, kind: type[FrameBody]) -> None:
    """The answer must be of the kind that was asked for."""
    if not isinstance(body, kind):
        raise BadFrame(f"expected a frame of kind {kind.__name__.lower()}, got {type(body).__name__.lower()}")
