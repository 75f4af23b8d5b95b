"""The manifest: the readable list of what one snapshot on disk consists of.

It names the model by its fingerprint. Tokenizer and chat template are not part of the identity: the key is the
token ids themselves, and state is a function of token ids and weights; how text became those ids changes nothing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import torch

from rekindle.errors import BadSnapshotFile
from rekindle.prompt import BoundaryKind
from rekindle.snapshots.files import digest
from rekindle.snapshots.types import Stretch
from rekindle.spec import PAGE

FORMAT: Final = "rekindle-snapshot"
VERSION: Final = 1
PAGE_HEADER: Final = PAGE * 4  # a page object starts with its token ids, int32
ALIGNMENT: Final = 64  # every tensor of the own object starts on such a byte

NAME = re.compile(r"[0-9a-f]{32}")  # of objects and manifests; nothing else ever becomes a path
DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
    )
}


class PageRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One attention layer's share of every page object, in ascending layer order."""

    layer: int
    dtype: str
    shape: tuple[int, ...]  # [2, PAGE, kv_heads, row]

    @property
    def nbytes(self) -> int:
        return tensor_bytes(self.dtype, self.shape)


class PartRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tensor inside the snapshot's own object."""

    name: str  # tail, state, window (of a layer), logits, drafter
    layer: int | None
    dtype: str
    shape: tuple[int, ...]
    offset: int
    bytes: int


class StretchRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    stop: int
    how: str
    cuts: tuple[int, ...] = ()


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: str
    version: int
    fingerprint: str
    id: str  # digest of fingerprint and tokens; also the file's name
    position: int
    kind: str
    conversation: str | None
    saved: int  # seconds since the epoch
    grid: int
    stretches: tuple[StretchRow, ...]
    own: str  # the object with everything that is not a sealed page
    own_bytes: int
    parts: tuple[PartRow, ...]
    page_rows: tuple[PageRow, ...]
    tail_tokens: tuple[int, ...]
    pages: tuple[str, ...]
    checksum: str = ""

    @property
    def page_bytes(self) -> int:
        return PAGE_HEADER + sum(row.nbytes for row in self.page_rows)

    @property
    def has_logits(self) -> bool:
        return any(row.name == "logits" for row in self.parts)

    @property
    def objects(self) -> dict[str, int]:
        """Every object the snapshot needs, once, with its size."""
        return {**dict.fromkeys(self.pages, self.page_bytes), self.own: self.own_bytes}


class _Head(msgspec.Struct):
    """What every version of the format can be asked."""

    format: str
    version: int
    fingerprint: str


def key_of(fingerprint: str, tokens: np.ndarray) -> str:
    """The id of the snapshot of this model after these tokens."""
    assert tokens.dtype == np.int32, f"token ids are int32, not {tokens.dtype}"
    model = np.frombuffer(fingerprint.encode(), dtype=np.uint8)
    return digest([model, np.ascontiguousarray(tokens).view(np.uint8)])


def tensor_bytes(dtype: str, shape: Iterable[int]) -> int:
    return DTYPES[dtype].itemsize * math.prod(shape)


def encode(manifest: Manifest) -> bytes:
    """Signed with its own checksum and laid out for reading."""
    signed = msgspec.structs.replace(manifest, checksum=_checksum(manifest))
    return msgspec.json.format(msgspec.json.encode(signed), indent=1)


def decode(data: bytes, fingerprint: str | None, name: str) -> Manifest:
    """The manifest in `data`, if it is whole, of our version, and (unless None) of the model `fingerprint`.

    `name` is the id that the file's name claims.
    """
    try:
        head = msgspec.json.decode(data, type=_Head)
        if (head.format, head.version) != (FORMAT, VERSION):
            raise BadSnapshotFile(f"{name}: format {head.format} {head.version}, this server reads {FORMAT} {VERSION}")
        if fingerprint is not None and head.fingerprint != fingerprint:
            raise BadSnapshotFile(f"{name}: written for model {head.fingerprint}, this one is {fingerprint}")
        manifest = msgspec.json.decode(data, type=Manifest)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise BadSnapshotFile(f"{name}: not a readable manifest: {error}") from error
    _check(manifest, name)
    return manifest


def read(path: Path, fingerprint: str | None) -> Manifest:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise BadSnapshotFile(f"{path.name}: cannot be read: {error.strerror}") from error
    return decode(data, fingerprint, path.stem)


def stretches_of(manifest: Manifest) -> tuple[Stretch, ...]:
    return tuple(Stretch(row.stop, row.how, row.cuts) for row in manifest.stretches)


def _checksum(manifest: Manifest) -> str:
    body = msgspec.json.encode(msgspec.structs.replace(manifest, checksum=""))
    return digest([np.frombuffer(body, dtype=np.uint8)])


def _check(manifest: Manifest, name: str) -> None:
    """Nothing past this point trusts a number that was not checked here."""
    _demand(manifest.checksum == _checksum(manifest), name, "checksum does not match its text")
    _demand(manifest.id == name, name, f"it says it is {manifest.id}")
    _demand(all(NAME.fullmatch(n) for n in (manifest.id, manifest.own, *manifest.pages)), name, "a name is not ours")
    _demand(manifest.kind in set(BoundaryKind), name, f"unknown boundary kind {manifest.kind}")
    _demand(len(manifest.tail_tokens) < PAGE, name, "the tail is longer than a page")
    covered = len(manifest.pages) * PAGE + len(manifest.tail_tokens)
    _demand(covered == manifest.position, name, f"pages and tail hold {covered} of {manifest.position} positions")
    _demand(all(-(2**31) <= t < 2**31 for t in manifest.tail_tokens), name, "a token id is no int32")
    layouts = [(row.dtype, row.shape) for row in manifest.page_rows] + [(r.dtype, r.shape) for r in manifest.parts]
    for dtype, shape in layouts:
        _demand(dtype in DTYPES, name, f"unknown dtype {dtype}")
        _demand(all(n >= 0 for n in shape), name, f"negative shape {shape}")
    for page in manifest.page_rows:
        _demand(page.shape[:2] == (2, PAGE) and len(page.shape) == 4, name, f"a page cannot be {page.shape}")
    for part in manifest.parts:
        _demand(part.bytes == tensor_bytes(part.dtype, part.shape), name, f"{part.name} lies about its bytes")
        _demand(part.offset >= 0 and part.offset % ALIGNMENT == 0, name, f"{part.name} lies askew")
        _demand(part.offset + part.bytes <= manifest.own_bytes, name, f"{part.name} ends behind its object")


def _demand(holds: bool, name: str, what: str) -> None:
    if not holds:
        raise BadSnapshotFile(f"{name}: {what}")
