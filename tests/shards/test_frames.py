from __future__ import annotations

import tracemalloc
from dataclasses import replace

import msgspec
import pytest
import torch
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from rekindle.batch import Batch, Segment, Wanted
from rekindle.errors import BadFrame, LinkRefused
from rekindle.shards import frames
from rekindle.shards.frames import DTYPES, Frame, Header, Limits, TensorEntry, export_frame, import_frame
from rekindle.shards.parts import export_parts, import_parts, pages_of
from rekindle.snapshots.types import TAIL, Page, Part
from rekindle.spec import PAGE

LIMITS = Limits(header=1 << 16, frame=1 << 20)
MiB = 1 << 20


def sent(frame: Frame) -> list[zmq.Frame]:
    """As it would arrive."""
    return [zmq.Frame(bytes(part)) for part in export_frame(frame, LIMITS)]


def lie(table: list[TensorEntry], parts: list[bytes], body: frames.AnyBody | None = None) -> list[zmq.Frame]:
    """A frame whose header says what we like."""
    header = Header(7, body or frames.Output(frames.PagesEntry(1, 0, 1)), tuple(table))
    raw = frames.MAGIC + bytes([frames.VERSION]) + msgspec.msgpack.encode(header)
    return [zmq.Frame(part) for part in (raw, *parts)]


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (2, 0, 4), (1, 2, 3, 4, 5)], ids=str)
def test_a_tensor_arrives_bit_for_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.randn(shape) * 100).to(dtype)
    arrived = import_frame(sent(Frame(3, frames.Output(frames.PagesEntry(1, 0, 1)), {"x": tensor})), LIMITS)
    assert arrived.id == 3
    assert arrived.tensors["x"].dtype is dtype
    assert torch.equal(arrived.tensors["x"], tensor)


def test_a_tensor_that_is_not_contiguous_or_carries_a_gradient_arrives_too() -> None:
    tensor = torch.arange(12.0, requires_grad=True).reshape(3, 4).T
    assert torch.equal(
        import_frame(sent(Frame(1, frames.Output(frames.PagesEntry(1, 0, 1)), {"x": tensor})), LIMITS).tensors["x"],
        tensor,
    )


def test_long_exported_parts_are_views_of_the_tensor_and_imported_tensors_views_of_the_message() -> None:
    tensor = torch.zeros(frames.SHORT)
    _, part = export_frame(Frame(1, frames.Output(frames.PagesEntry(1, 0, 1)), {"x": tensor}), LIMITS)
    tensor[0] = 5.0
    assert bytes(part) == bytes(tensor.numpy().data)
    message = sent(Frame(1, frames.Captured((), frames.PagesEntry(1, 0, 1)), {"x": torch.zeros(1000)}))
    arrived = import_frame(message, LIMITS).tensors["x"]
    message[1].buffer[0:4] = torch.tensor([7.0]).numpy().tobytes()
    assert arrived[0] == 7.0


@pytest.mark.parametrize("length", [1000, frames.SHORT])
@pytest.mark.parametrize(
    "body",
    [frames.Output(frames.PagesEntry(1, 0, 1)), frames.Forward((frames.SegmentEntry(0, 0, (1,), Wanted.NONE),), False)],
)
def test_what_is_computed_on_lies_where_torch_would_put_it(body: frames.AnyBody, length: int) -> None:
    message = sent(Frame(1, body, {"x": torch.zeros(length)}))
    arrived = import_frame(message, LIMITS).tensors["x"]
    assert arrived.data_ptr() % 64 == 0
    message[1].buffer[0:4] = torch.tensor([7.0]).numpy().tobytes()
    assert arrived[0] == 0.0


def test_a_batch_arrives_whole() -> None:
    scored = Segment(1, 7, (4, 5), Wanted.SCORED, top=3)
    batch = Batch((Segment(2, 5, (1, 2, 3), Wanted.ALL), Segment(0, 0, (9,), Wanted.LAST), scored), rewindable=True)
    body = import_frame(sent(Frame(1, frames.export_batch(batch))), LIMITS).body
    assert isinstance(body, frames.Forward)
    assert frames.import_batch(body) == batch


@pytest.mark.parametrize("token", [1 << 31, 1 << 32, (1 << 48) - 1, (1 << 64) - 1, -1])
def test_a_token_id_of_more_than_31_bits_is_refused(token: int) -> None:
    body = frames.Forward((frames.SegmentEntry(0, 0, (1, token), Wanted.NONE),), False)
    message = frames.export_frame(Frame(1, body), LIMITS)
    with pytest.raises(BadFrame, match="does not read as one of version"):
        frames.import_frame([zmq.Frame(bytes(part)) for part in message], LIMITS)


def test_a_batch_with_one_slot_twice_is_refused() -> None:
    entry = frames.SegmentEntry(0, 0, (1,), Wanted.NONE)
    with pytest.raises(BadFrame, match=r"slots \[0, 0\]"):
        frames.import_batch(frames.Forward((entry, entry), False))


@pytest.mark.parametrize(
    ("entry", "part", "says"),
    [
        (TensorEntry("x", "float32", (2,), 8), b"1234", "header says 8, the part holds 4"),
        (TensorEntry("x", "float32", (2,), 4), b"1234", "takes 8 bytes, the header says 4"),
        (TensorEntry("x", "float32", (1 << 40,), 4), b"1234", "takes 4398046511104 bytes"),
        (TensorEntry("x", "float64", (1,), 8), b"12345678", "dtype 'float64', known are float32"),
        (TensorEntry("x", "object", (1,), 8), b"12345678", "dtype 'object'"),
        (TensorEntry("x", "uint8", (0, 1 << 40, 1 << 40), 0), b"", "empty shape"),
        (TensorEntry("x", "uint8", (-1, -4), 4), b"1234", "Expected `int` >= 0"),
        (TensorEntry("x", "uint8", (1,) * 9, 1), b"1", "length <= 8"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_tensor_that_lies_about_itself_is_refused(entry: TensorEntry, part: bytes, says: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(BadFrame, match=says):
            import_frame(lie([entry], [part]), LIMITS)
        assert tracemalloc.get_traced_memory()[1] < MiB
    finally:
        tracemalloc.stop()


def test_missing_and_surplus_parts_are_refused() -> None:
    entry = TensorEntry("x", "uint8", (1,), 1)
    with pytest.raises(BadFrame, match="lists 1 tensors, 0 parts"):
        import_frame(lie([entry], []), LIMITS)
    with pytest.raises(BadFrame, match="lists 0 tensors, 1 parts"):
        import_frame(lie([], [b"x"]), LIMITS)
    with pytest.raises(BadFrame, match="2 tensors under 1 names"):
        import_frame(lie([entry, entry], [b"x", b"y"]), LIMITS)
    with pytest.raises(BadFrame, match="no parts"):
        import_frame([], LIMITS)


def test_sizes_are_limited_on_both_ends() -> None:
    big = torch.zeros(LIMITS.frame, dtype=torch.uint8)
    with pytest.raises(BadFrame, match=f"the limit is {LIMITS.frame}"):
        export_frame(Frame(1, frames.Output(frames.PagesEntry(1, 0, 1)), {"x": big}), LIMITS)
    with pytest.raises(BadFrame, match=f"the limit is {LIMITS.frame}"):
        import_frame(lie([TensorEntry("x", "uint8", (LIMITS.frame,), LIMITS.frame)], [bytes(LIMITS.frame)]), LIMITS)
    long = frames.Forward((frames.SegmentEntry(0, 0, tuple(range(1 << 15)), Wanted.NONE),), False)
    with pytest.raises(BadFrame, match=f"the limit is {LIMITS.header}"):
        export_frame(Frame(1, long), LIMITS)
    with pytest.raises(BadFrame, match=f"the limit is {LIMITS.header}"):
        import_frame([zmq.Frame(bytes(LIMITS.header + 1))], LIMITS)


def test_another_version_names_both() -> None:
    raw = frames.MAGIC + b"\x09" + b"whatever a later version may mean"
    with pytest.raises(LinkRefused, match=f"speaks frame version 9, this end version {frames.VERSION}"):
        import_frame([zmq.Frame(raw)], LIMITS)


def test_an_unknown_kind_and_a_wrong_field_are_refused() -> None:
    for header in (
        [1, ["dance"], []],
        [1, ["open", "zero"], []],
        [1, ["open", 1, 2], []],
        [1, ["open"], []],
        {"id": 1},
    ):
        raw = frames.MAGIC + bytes([frames.VERSION]) + msgspec.msgpack.encode(header)
        with pytest.raises(BadFrame, match="does not read"):
            import_frame([zmq.Frame(raw)], LIMITS)


# Parts


def kv_part(pages: int, rows: int) -> Part:
    made = tuple(Page(torch.randn(2, PAGE, 2, 4).to(torch.bfloat16)) for _ in range(pages))
    return Part(1, {TAIL: torch.randn(2, rows, 2, 4).to(torch.bfloat16)}, made)


def test_held_pages_are_not_sent_and_come_back_as_the_same_objects() -> None:
    old = kv_part(3, 5)
    new = replace(old, pages=(*old.pages[:2], *kv_part(2, 0).pages))
    exported = export_parts([new], pages_of([old]))
    assert exported.tensors["1/pages"].shape[0] == 2
    (part,) = import_parts(exported.entries, exported.tensors, pages_of([old]))
    assert part.pages[:2] == old.pages[:2]
    assert all(torch.equal(a.data, b.data) for a, b in zip(part.pages, new.pages, strict=True))


def test_a_part_that_builds_on_pages_nobody_holds_is_refused() -> None:
    part = kv_part(2, 0)
    exported = export_parts([part], pages_of([part]))
    with pytest.raises(BadFrame, match="builds on 2 pages, this end holds 0"):
        import_parts(exported.entries, exported.tensors, {})


@pytest.mark.parametrize(
    ("pages", "tail"),
    [
        (torch.zeros(1, 2, PAGE, 2, 4), torch.zeros(2, PAGE, 2, 4)),  # the tail is a whole page
        (torch.zeros(1, 2, PAGE, 2, 4), torch.zeros(2, 3, 2, 5)),  # other rows
        (torch.zeros(1, 2, 32, 2, 4), torch.zeros(2, 3, 2, 4)),  # other pages
        (torch.zeros(1, 2, PAGE, 2, 4, dtype=torch.bfloat16), torch.zeros(2, 3, 2, 4)),
        (torch.zeros(0), torch.zeros(0)),
    ],
)
def test_kv_tensors_of_another_layout_are_refused(pages: torch.Tensor, tail: torch.Tensor) -> None:
    with pytest.raises(BadFrame, match=r"a paged part is pages \[n, 2, 64"):
        import_parts([frames.PartEntry(1, (TAIL,))], {"1/pages": pages, "1.tail": tail}, {})


def test_the_query_of_a_sparse_run_travels_with_its_part() -> None:
    plain = kv_part(1, 2)
    part = replace(plain, tensors={**plain.tensors, "query": torch.randn(4, 8)})
    exported = export_parts([part], {})
    (arrived,) = import_parts(exported.entries, exported.tensors, {})
    assert dict(arrived.tensors) == dict(part.tensors)


def test_missing_tensors_and_pages_of_a_part_without_a_tail_are_refused() -> None:
    state, held = torch.zeros(2, 2, 2), pages_of([replace(kv_part(2, 0), layer=0)])
    entry = frames.PartEntry(0, ("state", "window"))
    with pytest.raises(BadFrame, match=r"need the tensors \['0.state', '0.window'\]"):
        import_parts([entry], {"0.state": state}, {})
    with pytest.raises(BadFrame, match=r"need the tensors \['0.state', '0.window'\]"):
        import_parts([entry], {"0.state": state, "0.window": state, "0/pages": state}, {})
    with pytest.raises(BadFrame, match="builds on 1 pages and brings no tail"):
        import_parts([frames.PartEntry(0, ("state",), kept=1)], {"0.state": state}, held)


@pytest.mark.parametrize("name", ["", "a.b", "1/pages", "State", "x" * 33])
def test_a_part_names_its_tensors_by_short_identifiers(name: str) -> None:
    frame = Frame(1, frames.Captured((frames.PartEntry(0, (name,)),), frames.PagesEntry(1, 0, 1)))
    with pytest.raises(BadFrame, match="does not read"):
        import_frame([zmq.Frame(bytes(part)) for part in export_frame(frame, LIMITS)], LIMITS)


# Fuzz


def an_honest_message() -> list[bytes]:
    part = kv_part(2, 3)
    exported = export_parts([part], {})
    frame = Frame(5, frames.Prepare(0, 131, exported.entries), exported.tensors)
    return [bytes(part) for part in export_frame(frame, LIMITS)]


HONEST = an_honest_message()


@st.composite
def damaged(draw: st.DrawFn) -> list[bytes]:
    """An honest message with some bytes of its header changed, cut or added, and parts dropped, swapped or resized."""
    header = bytearray(HONEST[0])
    for at, value in draw(st.lists(st.tuples(st.integers(0, len(header) - 1), st.integers(0, 255)), max_size=6)):
        header[at] = value
    parts = [bytes(header[: draw(st.integers(0, len(header)))]) + draw(st.binary(max_size=8)), *HONEST[1:]]
    parts = draw(st.permutations(parts)) if draw(st.booleans()) else parts
    parts = parts[: draw(st.integers(0, len(parts)))] + draw(st.lists(st.binary(max_size=64), max_size=2))
    return draw(st.sampled_from([parts, [bytes(header), *HONEST[1:]], [draw(st.binary(max_size=256))]]))


@settings(max_examples=500, deadline=None)
@given(damaged())
def test_no_damaged_frame_crashes_or_takes_memory(parts: list[bytes]) -> None:
    message = [zmq.Frame(part) for part in parts]
    tracemalloc.start()
    try:
        frame = import_frame(message, LIMITS)
        taken = sum(tensor.untyped_storage().nbytes() for tensor in frame.tensors.values())
        assert taken <= sum(map(len, parts))
        if isinstance(frame.body, frames.Prepare):
            import_parts(frame.body.parts, frame.tensors, {})
    except (BadFrame, LinkRefused):
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < MiB
