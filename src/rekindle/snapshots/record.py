"""What the disk store remembers of one snapshot without opening it, and what a manifest may say for one model."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rekindle.errors import BadSnapshotFile
from rekindle.prompt import BoundaryKind
from rekindle.snapshots import manifest
from rekindle.snapshots.files import PlainFiles, read_whole, shown
from rekindle.snapshots.manifest import NAME, PAGE_HEADER, Manifest, key_of


@dataclass(frozen=True, slots=True, eq=False)
class Record:
    id: str
    position: int
    kind: BoundaryKind
    conversation: str | None
    namespace: str
    has_logits: bool
    saved: int  # seconds since the epoch
    used: float  # last use, seconds since the epoch; only a hint for retention
    own_bytes: int
    manifest_bytes: int
    own: str
    pages: tuple[str, ...]
    page_bytes: int
    tail_tokens: tuple[int, ...]

    @classmethod
    def of(cls, listed: Manifest, manifest_bytes: int, used: float) -> Record:
        return cls(
            id=listed.id,
            position=listed.position,
            kind=BoundaryKind(listed.kind),
            conversation=listed.conversation,
            namespace=listed.whose,
            has_logits=listed.has_logits,
            saved=listed.saved,
            used=used,
            own_bytes=listed.own_bytes,
            manifest_bytes=manifest_bytes,
            own=listed.own,
            pages=tuple(map(sys.intern, listed.pages)),  # a chain repeats its names in every manifest
            page_bytes=listed.page_bytes,
            tail_tokens=listed.tail_tokens,
        )

    @property
    def objects(self) -> dict[str, int]:
        """Every object the snapshot needs, once, with its size."""
        return {**dict.fromkeys(self.pages, self.page_bytes), self.own: self.own_bytes}

    @property
    def nbytes(self) -> int:
        """Bytes it would take alone on an empty disk."""
        return self.manifest_bytes + sum(self.objects.values())


@dataclass(frozen=True, slots=True)
class Expected:
    """The model that snapshots are read for: what its manifests and token ids can be."""

    fingerprint: str
    vocabulary: int | None  # None: unknown
    largest: int | None  # bytes of an object; None: unknown

    def read(self, path: Path) -> Manifest:
        """The manifest, if what it says is possible for this model: no memory is taken for more."""
        listed = manifest.read(path, self.fingerprint)
        largest = max(listed.objects.values())
        if self.largest is not None and largest > self.largest:
            raise BadSnapshotFile(f"{listed.id}: an object of {largest} bytes, this model's have {self.largest}")
        logits = [row.shape[0] for row in listed.parts if row.name == "logits"]
        # Fewer: of the ids that have a token. Snapshots of earlier versions have one for every row of the head.
        if self.vocabulary is not None and any(values > self.vocabulary for values in logits):
            raise BadSnapshotFile(f"{listed.id}: logits of {logits[0]} tokens, the model has {self.vocabulary}")
        return listed

    def examine(self, path: Path, sizes: dict[str, int]) -> Record:
        """A record of the manifest at `path` if all its objects are among `sizes` in full length."""
        if path.suffix != ".json" or not NAME.fullmatch(path.stem):
            raise BadSnapshotFile(f"{shown(path.name)}: not the name of a manifest")
        listed = self.read(path)
        for name, nbytes in listed.objects.items():
            if sizes.get(name) != nbytes:
                raise BadSnapshotFile(f"{path.name}: object {name} should have {nbytes} bytes, {sizes.get(name)}")
        try:
            status = path.lstat()
        except OSError as error:
            raise BadSnapshotFile(f"{path.name}: cannot be read: {error.strerror}") from error
        return Record.of(listed, status.st_size, status.st_mtime)

    def check_tokens(self, tokens: np.ndarray, id: str, namespace: str) -> None:
        if key_of(self.fingerprint, tokens, namespace) != id:
            raise BadSnapshotFile(f"{id}: the token ids in its pages are not those of its key")
        lowest, highest = int(tokens.min()), int(tokens.max())
        if lowest < 0 or (self.vocabulary is not None and highest >= self.vocabulary):
            token = lowest if lowest < 0 else highest
            raise BadSnapshotFile(f"{id}: token {token} is outside the vocabulary of {self.vocabulary}")


def read_head(path: Path) -> np.ndarray:
    """The token ids at the front of a page object. Not verified: the digest over all tokens of a snapshot is."""
    head = np.empty(PAGE_HEADER, dtype=np.uint8)
    read_whole(PlainFiles(), [(str(path), 0, [head])], PAGE_HEADER)
    return head.view(np.int32)


def join_tokens(pages: Sequence[np.ndarray], tail: Sequence[int]) -> np.ndarray:
    return np.concatenate([*pages, np.asarray(tail, dtype=np.int32)], dtype=np.int32)
