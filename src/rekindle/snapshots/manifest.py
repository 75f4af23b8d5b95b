"""The manifest: the readable list of what one snapshot on disk consists of.

It names the model by its fingerprint. Tokenizer and chat template are not part of the identity: the key is the
token ids themselves, and state is a function of token ids and weights; how text became those ids changes nothing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Final, TypeAlias

import msgspec
import numpy as np
import torch

from rekindle.errors import BadSnapshotFile
from rekindle.prompt import BoundaryKind
from rekindle.snapshots.files import digest, read_plain, shown
from rekindle.snapshots.types import TAIL, Stretch
from rekindle.spec import PAGE

FORMAT: Final = "rekindle-snapshot"
VERSION: Final = 1
PAGE_HEADER: Final = PAGE * 4  # a page object starts with its token ids, int32
ALIGNMENT: Final = 64  # every tensor of the own object starts on such a byte

MOST_BYTES: Final = 16 << 20  # of a manifest: some thirty million tokens
MOST_VALUES: Final = 1 << 48  # of a tensor, not counting sizes of 0: what torch can compute strides of

LOGITS: Final = "logits"
DRAFTER: Final = "drafter"  # earlier versions could keep a drafter's context beside the layers; it is not read
TENSOR = re.compile(r"[a-z][a-z0-9_]{0,31}")  # names of a layer's tensors

NAME = re.compile(r"[0-9a-f]{32}")  # of objects and manifests; nothing else ever becomes a path
FINGERPRINT = re.compile(r"[0-9a-f]{16,128}")  # its beginning becomes a folder
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


Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=1 << 48)]
Layer: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]
TokenId: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
Word: TypeAlias = Annotated[str, msgspec.Meta(max_length=128)]
Shape: TypeAlias = Annotated[tuple[Count, ...], msgspec.Meta(max_length=8)]


class PageRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One paged layer's share of every page object, in ascending layer order."""

    layer: Layer
    dtype: Word
    shape: Shape  # [2, PAGE, kv_heads, row]

    @property
    def nbytes(self) -> int:
        return tensor_bytes(self.dtype, self.shape)


class PartRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tensor inside the snapshot's own object."""

    name: Word  # of a layer: what the layer calls it, a paged one's open page is "tail"; without a layer: logits
    layer: Layer | None
    dtype: Word
    shape: Shape
    offset: Count
    bytes: Count


class StretchRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    stop: Count
    how: Word
    cuts: tuple[Count, ...] = ()


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: Word
    version: Count
    fingerprint: Word
    id: Word  # digest of fingerprint, name space and tokens; also the file's name
    position: Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]
    kind: Word
    conversation: str | None
    saved: Annotated[int, msgspec.Meta(ge=0, lt=1 << 37)]  # seconds since the epoch, in years of four digits
    grid: Count
    stretches: tuple[StretchRow, ...]
    own: Word  # the object with everything that is not a sealed page
    own_bytes: Count
    parts: tuple[PartRow, ...]
    page_rows: tuple[PageRow, ...]
    tail_tokens: Annotated[tuple[TokenId, ...], msgspec.Meta(max_length=PAGE - 1)]
    pages: tuple[Word, ...]
    checksum: Word = ""
    namespace: Word | msgspec.UnsetType = msgspec.UNSET  # unset, and not written, where it is the common one

    @property
    def whose(self) -> str:
        """The name space, "" for the common one."""
        return "" if self.namespace is msgspec.UNSET else self.namespace

    @property
    def page_bytes(self) -> int:
        return PAGE_HEADER + sum(row.nbytes for row in self.page_rows)

    @property
    def has_logits(self) -> bool:
        return any(row.name == LOGITS for row in self.parts)

    @property
    def objects(self) -> dict[str, int]:
        """Every object the snapshot needs, once, with its size."""
        return {**dict.fromkeys(self.pages, self.page_bytes), self.own: self.own_bytes}


class _Head(msgspec.Struct):
    """What every version of the format can be asked."""

    format: str
    version: int
    fingerprint: str


def key_of(fingerprint: str, tokens: np.ndarray, namespace: str = "") -> str:
    """The id of the snapshot of this model after these tokens in that name space."""
    assert tokens.dtype == np.int32, f"token ids are int32, not {tokens.dtype}"
    # A name ends with a NUL, which no name contains; the common name space adds nothing.
    whose = f"\0{namespace}\0" if namespace else ""
    head = np.frombuffer((fingerprint + whose).encode(), dtype=np.uint8)
    return digest([head, np.ascontiguousarray(tokens).view(np.uint8)])


def tensor_bytes(dtype: str, shape: Iterable[int]) -> int:
    return DTYPES[dtype].itemsize * math.prod(shape)


# Made once, while one thread imports this. The first decoding of a struct looks up the types of its fields, and the
# process dies (msgspec 0.22) where a second thread decodes into it meanwhile.
_decode_head = msgspec.json.Decoder(_Head).decode
_decode_manifest = msgspec.json.Decoder(Manifest).decode


def encode(manifest: Manifest) -> bytes:
    """Signed with its own checksum and laid out for reading."""
    signed = msgspec.structs.replace(manifest, checksum=_checksum(manifest))
    return msgspec.json.format(msgspec.json.encode(signed), indent=1)


def decode(data: bytes, fingerprint: str | None, name: str) -> Manifest:
    """The manifest in `data`, if it is whole, of our version, and (unless None) of the model `fingerprint`.

    `name` is the id that the file's name claims.
    """
    said = shown(name)
    try:
        head = _decode_head(data)
        if (head.format, head.version) != (FORMAT, VERSION):
            found = f"{shown(head.format)} {head.version}"
            raise BadSnapshotFile(f"{said}: format {found}, this server reads {FORMAT} {VERSION}")
        if fingerprint is not None and head.fingerprint != fingerprint:
            raise BadSnapshotFile(
                f"{said}: written for model {shown(head.fingerprint)}, this one is {shown(fingerprint)}"
            )
        manifest = _decode_manifest(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise BadSnapshotFile(f"{said}: not a readable manifest: {shown(str(error))}") from error
    _demand(manifest.id == name, said, f"it says it is {shown(manifest.id)}")
    _check(manifest, said)
    return manifest


def read(path: Path, fingerprint: str | None) -> Manifest:
    return decode(read_plain(path, MOST_BYTES), fingerprint, path.stem)


def stretches_of(manifest: Manifest) -> tuple[Stretch, ...]:
    return tuple(Stretch(row.stop, row.how, row.cuts) for row in manifest.stretches)


def _checksum(manifest: Manifest) -> str:
    body = msgspec.json.encode(msgspec.structs.replace(manifest, checksum=""))
    return digest([np.frombuffer(body, dtype=np.uint8)])


def _check(manifest: Manifest, name: str) -> None:
    """Nothing past this point trusts a number that was not checked here, or by its type above."""
    _demand(manifest.checksum == _checksum(manifest), name, "checksum does not match its text")
    _demand(all(NAME.fullmatch(n) for n in (manifest.id, manifest.own, *manifest.pages)), name, "a name is not ours")
    _demand(bool(FINGERPRINT.fullmatch(manifest.fingerprint)), name, "its model's fingerprint is none")
    _demand(manifest.kind in set(BoundaryKind), name, f"unknown boundary kind {shown(manifest.kind)}")
    covered = len(manifest.pages) * PAGE + len(manifest.tail_tokens)
    _demand(covered == manifest.position, name, f"pages and tail hold {covered} of {manifest.position} positions")
    stops = [row.stop for row in manifest.stretches]
    _demand(stops == sorted(stops), name, "its stretches do not follow each other")
    _demand(not stops or stops[-1] <= manifest.position, name, "its stretches end behind its position")
    _check_page_rows(manifest.page_rows, name)
    _check_parts(manifest, name)


def _check_page_rows(rows: Sequence[PageRow], name: str) -> None:
    layers = [row.layer for row in rows]
    _demand(layers == sorted(set(layers)), name, f"layers of a page are {layers[:8]}, each comes once and in order")
    for row in rows:
        _check_layout(row, name)
        _demand(row.shape[:2] == (2, PAGE) and len(row.shape) == 4, name, f"a page cannot be {row.shape}")


def _check_parts(manifest: Manifest, name: str) -> None:
    rows: dict[int | None, PageRow] = {row.layer: row for row in manifest.page_rows}
    single = [(part.name, part.layer) for part in manifest.parts if part.name != DRAFTER]
    _demand(len(single) == len(set(single)), name, "a part of a layer comes twice")
    tails = {layer for part, layer in single if part == TAIL}
    _demand(tails == rows.keys(), name, f"{len(rows)} layers have pages, {len(tails)} have tails, or other ones")
    end = 0
    for part in manifest.parts:
        what = f"{shown(part.name)} of layer {part.layer}"
        _check_layout(part, name)
        _demand(_fits_its_name(part, rows.get(part.layer), manifest.position), name, f"{what} cannot be {part.shape}")
        _demand(part.bytes == tensor_bytes(part.dtype, part.shape), name, f"{what} lies about its bytes")
        _demand(part.offset == end + -end % ALIGNMENT, name, f"{what} does not begin where the part before it ends")
        end = part.offset + part.bytes
    _demand(end == manifest.own_bytes, name, f"its parts end at {end}, its own object at {manifest.own_bytes}")


def _check_layout(row: PageRow | PartRow, name: str) -> None:
    _demand(row.dtype in DTYPES, name, f"unknown dtype {shown(row.dtype)}")
    _demand(math.prod(filter(None, row.shape)) <= MOST_VALUES, name, f"no tensor is {row.shape}")


def _fits_its_name(part: PartRow, row: PageRow | None, position: int) -> bool:
    """Whether a part can be what its name says; `row` is that of its layer, if the layer has pages. What else a layer
    holds is checked by the layer, when the snapshot is restored."""
    if part.name == TAIL:
        return row is not None and (part.dtype, part.shape) == (row.dtype, (2, position % PAGE, *row.shape[2:]))
    if part.name == LOGITS:
        return part.layer is None and (part.dtype, len(part.shape)) == ("float32", 1)
    if part.name == DRAFTER:
        return part.layer is None
    return part.layer is not None and bool(TENSOR.fullmatch(part.name))


def _demand(holds: bool, name: str, what: str) -> None:
    if not holds:
        raise BadSnapshotFile(f"{name}: {what}")
