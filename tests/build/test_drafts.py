"""The settings choose a drafter, and the plan counts what going back takes."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.answers import Answer
from support.drafter_files import tiny_drafter
from support.tiny_files import write_tied, write_tiny_file, write_with_block

from rekindle.build import build_engine
from rekindle.build.drafts import FEATURE_COPIES, drafts_of, open_drafter_of
from rekindle.build.model import open_model
from rekindle.build.planning import plan_model
from rekindle.config import Config
from rekindle.engine.types import DraftReport
from rekindle.errors import BadConfig, BadModelFile
from rekindle.placement import Device, Machine, Plan, show_plan
from rekindle.snapshots.types import DRAFTER_LAYER
from rekindle.spec import snapshot_bytes
from rekindle.speculative.context import IDENTITY
from rekindle.speculative.files import open_drafter
from rekindle.speculative.mtp_file import MtpFile

MODEL = "tiny-qwen35-Q4_K_M.gguf"


def plan(
    golden: Path, draft: str, kv_mode: str = "exact", device: str = "cpu", model_name: str = MODEL, **fields: Any
) -> Plan:
    model, cpu = open_model(golden / model_name), Device(device, "cpu", 4 << 30, host=True)
    config = Config(sequences=2, context=1024, draft=draft, kv_mode=kv_mode, **fields)
    return plan_model(config, model, Machine((cpu,), 8 << 30))


@pytest.fixture(scope="module")
def drafter(golden: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_drafter(tmp_path_factory.mktemp("drafter") / "d", open_model(golden / MODEL).spec, version=2)


def test_on_cpus_lookup_is_the_default_and_its_blocks_are_counted(golden: Path) -> None:
    assert drafts_of(Config(), ["cpu", "cpu"], None).name == "lookup"
    assert plan(golden, "auto").wishes.rewind_rows == 16
    assert plan(golden, "lookup").wishes.rewind_rows == 16
    assert plan(golden, "lookup").stage(0).bytes_of("rewind rows") > 0


def test_where_nothing_drafts_a_reason_is_given_and_nothing_is_reserved(golden: Path) -> None:
    drafts = drafts_of(Config(draft="off"), ["cpu"], None)
    assert drafts.make is None and drafts.off is not None and "--draft" in drafts.off
    assert plan(golden, "off").stage(0).bytes_of("rewind rows") == 0


def test_sparse_mode_drafts_too(golden: Path) -> None:
    assert drafts_of(Config(draft="lookup", kv_mode="sparse"), ["cpu"], None).make is not None
    assert plan(golden, "lookup", "sparse").stage(0).bytes_of("rewind rows") > 0


def test_beside_a_gpu_or_a_shard_drafts_are_for_those_who_ask() -> None:
    for devices in (["cuda:0", "cpu"], ["cpu", "cpu@far"]):
        quiet = drafts_of(Config(), devices, None)
        assert quiet.make is None and "--draft lookup" in (quiet.off or "")
    assert drafts_of(Config(draft="lookup"), ["cuda:0"], None).name == "lookup"


def test_a_drafter_that_does_not_exist_is_refused() -> None:
    with pytest.raises(BadConfig, match="--draft is guess; it must be auto, lookup, dflash, mtp or off"):
        Config(draft="guess")


def test_a_drafter_and_its_option_go_together(drafter: Path) -> None:
    both, alone = Config(drafter=drafter), Config(drafter=drafter, draft="dflash")
    file = open_drafter(drafter)
    beside, only = drafts_of(both, ["cuda:0"], file), drafts_of(alone, ["cpu"], file)
    assert (beside.name, beside.model) == ("lookup", "dflash")
    assert only.make is None and only.model == "dflash"
    for draft in ("lookup", "off"):
        with pytest.raises(BadConfig, match=f"--draft {draft} leaves it unused"):
            Config(drafter=drafter, draft=draft)
    with pytest.raises(BadConfig, match="--draft dflash needs a drafter"):
        Config(draft="dflash")


def test_the_plan_counts_the_drafter_where_it_will_live(golden: Path, drafter: Path) -> None:
    """Beside the head; in this process's RAM, with an embedding and a head of its own, if they are in a shard."""
    weights = sum(file.stat().st_size for file in drafter.glob("*.safetensors"))
    here = plan(golden, "dflash", drafter=drafter)
    beside = here.stage(0).bytes_of("drafter")
    assert beside >= weights and here.wishes.rewind_rows == 16
    assert plan(golden, "off").stage(0).bytes_of("drafter") == 0
    far = plan(golden, "dflash", device="cpu@lab", drafter=drafter)
    in_ram = sum(item.bytes for item in far.host_items if item.name == "drafter")
    assert far.stage(0).bytes_of("drafter") == 0 and in_ram > beside
    assert far.stage(0).bytes_of("features") > 0 == here.stage(0).bytes_of("features"), "tapped layers send theirs"
    less = plan(golden, "dflash", drafter=drafter, grid=256).stage(0).bytes_of("drafter")
    values = open_drafter(drafter).spec.features
    assert beside - less == FEATURE_COPIES * 256 * values * here.wishes.compute_bytes, (
        "features of a chunk, and their copies"
    )
    assert "drafter" in show_plan(here)


def test_a_drafter_for_another_model_is_refused_with_both_sides(golden: Path, tmp_path: Path) -> None:
    spec = open_model(golden / MODEL).spec
    other = tiny_drafter(tmp_path / "other", replace(spec, hidden=2 * spec.hidden))
    with pytest.raises(BadModelFile, match=f"other reads rows of {2 * spec.hidden} values, .* {spec.hidden}"):
        plan(golden, "dflash", drafter=other)


def drafted(model: Path, drafter: Path) -> DraftReport:
    """An answer with the drafter has the tokens of one without."""
    answers = {}
    settings: dict[str, dict[str, Any]] = {"plain": {"draft": "off"}, "drafted": {"drafter": drafter}}
    for name, fields in settings.items():
        built = build_engine(Config(model=model, devices=("cpu",), context=512, sequences=2, **fields))
        answers[name] = Answer(built.engine, range(40), max_tokens=24)
        answers[name].wait()
        built.stop()
    assert answers["drafted"].tokens == answers["plain"].tokens
    return answers["drafted"].finished.draft


def test_a_snapshot_with_the_drafters_context_takes_no_more_than_the_plan_says(golden: Path, drafter: Path) -> None:
    fields: dict[str, Any] = {"devices": ("cpu",), "context": 1024, "sequences": 1, "draft": "dflash"}
    built = build_engine(Config(model=golden / MODEL, drafter=drafter, **fields))
    answer = Answer(built.engine, [token % 300 for token in range(500)], max_tokens=4)
    answer.wait()
    built.engine.prefixes.flush()
    sizes, entries = built.plan.snapshot_bytes, built.engine.prefixes.entries()
    snapshot = built.engine.prefixes.at_hand(min(entries, key=lambda entry: entry.position))
    built.stop()
    assert snapshot is not None and snapshot.position == 500 and snapshot.parts[-1].layer == DRAFTER_LAYER
    rows = sum(tensor.nbytes for name, tensor in snapshot.parts[-1].tensors.items() if name != IDENTITY)
    assert sizes.state == snapshot_bytes(built.plan.spec, built.plan.wishes.kv_type).state + rows
    held = snapshot.own_bytes + sum(page.nbytes for part in snapshot.parts for page in part.pages)
    assert sizes.at(500 - 64) < held <= sizes.at(500)


def test_an_engine_is_built_with_its_drafter(golden: Path, drafter: Path) -> None:
    report = drafted(golden / MODEL, drafter)
    assert (report.drafter, report.off) == ("lookup and dflash", None)


def test_drafters_look_tokens_up_in_the_head_of_a_tied_model(tmp_path: Path) -> None:
    model = write_tied(tmp_path / "tied.gguf", MODEL)
    report = drafted(model, tiny_drafter(tmp_path / "d", open_model(model).spec, version=2))
    assert (report.drafter, report.off) == ("lookup and dflash", None) and report.blocks


# MTP


@pytest.fixture(scope="module", params=["tiny-qwen35-f16.gguf", "tiny-qwen35moe-Q4_K_M.gguf"])
def blocks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model that has a block, `own`, a companion file, `companion`, and the model without: `plain`."""
    folder = tmp_path_factory.mktemp("mtp")
    write_with_block(folder / "own.gguf", request.param)
    write_with_block(folder / "companion.gguf", request.param, alone=True)
    write_tiny_file(folder / request.param).rename(folder / "plain.gguf")
    return folder


def answered(model: Path, **fields: Any) -> Answer:
    built = build_engine(Config(model=model, devices=("cpu",), context=512, sequences=2, **fields))
    answer = Answer(built.engine, range(40), max_tokens=24)
    answer.wait()
    built.stop()
    return answer


def test_the_block_of_the_models_own_file_drafts_by_default_on_cpus(blocks: Path) -> None:
    own = answered(blocks / "own.gguf")
    assert own.finished.draft.drafter == "lookup and mtp" and own.finished.draft.off is None
    plain = answered(blocks / "plain.gguf", draft="off")
    assert own.tokens == plain.tokens == answered(blocks / "own.gguf", draft="off").tokens
    model = open_model(blocks / "own.gguf")
    assert open_drafter_of(Config(), model, ["cuda:0"]) is None
    assert open_drafter_of(Config(draft="lookup"), model, ["cpu"]) is None
    named = open_drafter_of(Config(draft="mtp"), model, ["cuda:0"])
    assert isinstance(named, MtpFile) and drafts_of(Config(draft="mtp"), ["cuda:0"], named).model == "mtp"


def test_a_companion_file_drafts_as_the_models_own_block(blocks: Path) -> None:
    """It holds the same tensors; which blocks are tried hangs on measured times."""
    own, plain = (open_model(blocks / name) for name in ("own.gguf", "plain.gguf"))
    config = Config(draft="mtp", drafter=blocks / "companion.gguf")
    one, other = open_drafter_of(Config(draft="mtp"), own, ["cpu"]), open_drafter_of(config, plain, ["cpu"])
    assert isinstance(one, MtpFile) and isinstance(other, MtpFile)
    assert one.spec == other.spec and one.tensors == other.tensors
    assert all((one.file.values(name) == other.file.values(name)).all() for name in one.tensors)
    answer = answered(blocks / "plain.gguf", draft="mtp", drafter=blocks / "companion.gguf")
    assert answer.finished.draft.drafter == "mtp" and answer.finished.draft.blocks
    assert answer.tokens == answered(blocks / "plain.gguf", draft="off").tokens


def test_the_plan_counts_the_block(blocks: Path) -> None:
    name = "own.gguf"
    file = MtpFile(open_model(blocks / name).file)
    weights = sum(info.nbytes for info in file.tensors.values())
    without = plan(blocks, "lookup", model_name=name)
    with_block = plan(blocks, "mtp", model_name=name)
    assert without.stage(0).bytes_of("drafter") == 0
    assert weights < with_block.stage(0).bytes_of("drafter")
    assert with_block.wishes.drafter_context == 1024 * 2 * 2 * 64 * 2 + 4 * 256
    far = plan(blocks, "mtp", device="cpu@lab", model_name=name)
    assert sum(item.bytes for item in far.host_items if item.name == "drafter") > weights


def test_a_block_that_is_not_there_or_not_this_models_is_refused_with_both_sides(blocks: Path, tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match=r"--draft mtp: .*plain.gguf has 0 next-token-prediction blocks, expected one"):
        plan(blocks, "mtp", model_name="plain.gguf")
    with pytest.raises(BadConfig, match=r"--draft is dflash, and --drafter .*companion.gguf is one for --draft mtp"):
        plan(blocks, "dflash", model_name="plain.gguf", drafter=blocks / "companion.gguf")
    routed = "moe" in open_model(blocks / "plain.gguf").spec.architecture
    other = write_with_block(tmp_path / "o.gguf", FILES_OF_OTHERS[routed], alone=True)
    with pytest.raises(BadModelFile, match=r"o.gguf is for models of qwen35(moe)?, .* is one of qwen35"):
        plan(blocks, "mtp", model_name="plain.gguf", drafter=other)
    with pytest.raises(BadModelFile, match="holds only next-token-prediction"):
        open_model(blocks / "companion.gguf")


def test_a_block_that_cannot_be_read_is_left_out_unless_it_was_asked_for(blocks: Path, tmp_path: Path) -> None:
    """The model itself is sound: it is served, and the log says why its block does not draft."""
    model = open_model(blocks / "own.gguf")
    name = next(name for name in model.file.tensors if name.endswith("nextn.hnorm.weight"))
    del model.file.tensors[name]  # type: ignore[attr-defined]
    assert open_drafter_of(Config(), model, ["cpu"]) is None
    with pytest.raises(BadModelFile, match=name):
        open_drafter_of(Config(draft="mtp"), model, ["cpu"])


FILES_OF_OTHERS = {True: "tiny-qwen35-f16.gguf", False: "tiny-qwen35moe-Q4_K_M.gguf"}  # by whether a model is routed


if "REKINDLE_GOLDEN" in os.environ:

    def test_the_golden_drafter_drafts_for_the_golden_target() -> None:
        folder = Path(os.environ["REKINDLE_GOLDEN"])
        assert drafted(folder / "tiny-qwen35-f16.gguf", folder / "dflash").blocks
