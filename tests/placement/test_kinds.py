"""A kind of mixer that placement has never heard of is counted by its own answers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from support.paper_machine import GIB, dense, one_gpu

from rekindle.placement import Plan, Wishes, make_plan, show_plan
from rekindle.spec import PAGE, Bytes, MixerSpec, Shapes

WISHES = Wishes(8192, sequences=3, rewind_rows=4)


@dataclass(frozen=True, slots=True)
class SumSpec(MixerSpec):
    """A running sum per slot, and one value per token in pages."""

    kind: ClassVar[str] = "sum"

    width: int = 1000

    def tensors(self, hidden: int) -> Shapes:
        return {"sum.weight": (self.width, hidden)}

    @property
    def row_values(self) -> int:
        return 1 << 20

    def page_bytes(self, kv_type: str) -> int:
        return PAGE * self.width

    def slot_bytes(self) -> Bytes:
        return {"running sums": 4 * self.width}

    def rewind_bytes(self, rows: int, value_bytes: int = 4) -> int:
        return 8 * rows

    def work_bytes(self, rows: int, decode_rows: int) -> Bytes:
        return {"sum scratch": rows + decode_rows}


def plan_of_sums() -> Plan:
    spec, sizes = dense(layers=4)
    return make_plan(one_gpu(4 * GIB), replace(spec, mixers=(SumSpec(),) * 4), sizes, WISHES)


def test_a_new_kind_of_mixer_is_counted_by_its_own_answers() -> None:
    stage = plan_of_sums().stage(0)
    assert stage.page_bytes == 4 * PAGE * 1000
    assert stage.bytes_of("running sums") == 3 * 4 * 4000
    assert stage.bytes_of("rewind rows") == (3 + 1) * 4 * 8 * 4
    assert stage.bytes_of("padding slot and page") == 4 * 4000 + stage.page_bytes
    decode_rows = 3 * (1 + 4)
    assert stage.bytes_of("sum scratch") == 512 + 2 * decode_rows  # of one layer: they take turns
    assert stage.bytes_of("activations") == (512 + decode_rows) * (3 * 128 + (1 << 20)) * 2
    names = {item.name for item in stage.items}
    assert not names & {"recurrent state", "conv windows", "attention partials", "delta scratch"}


def test_a_plan_shows_the_items_of_a_new_kind_by_their_names() -> None:
    shown = show_plan(plan_of_sums())
    assert "running sums" in shown
    assert "sum scratch" in shown
