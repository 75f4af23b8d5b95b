"""tools/train_drafter.py: what it writes is a drafter that has learnt its target's answers."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import measure_drafter
import numpy as np
import pytest
import torch
import train_drafter
from measure_drafter import Target
from support.drafter_files import random_weights
from support.forked import run_forked
from train_drafter import Corpus, Drafter, Text, draw_blocks, given_texts, train

from rekindle.build import open_model
from rekindle.errors import BadConfig
from rekindle.speculative import naive
from rekindle.speculative.files import open_drafter
from rekindle.speculative.spec import DrafterSpec, DraftLayer

TOOL = Path(train_drafter.__file__)
TOPICS = ("the sea", "a fox", "bread", "winter", "old maps", "a violin", "rain", "the moon", "tea", "two brothers")
MASK = 2019  # <|fim_pad|> of the tiny models


def prompts_file(folder: Path, *more: Any) -> Path:
    chats = [{"messages": [{"role": "user", "content": f"Tell me about {topic}."}]} for topic in TOPICS]
    path = folder / "chats.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in (*chats, *more)))
    return path


SIZES = "--layers 2 --heads 4 --kv-heads 2 --head-dim 32 --block 6 --taps 1,4,6 --texts 6 --blocks 12 --keep last"
TIMES = "--write 600 --train 600 --longest 40 --context 256 --sequences 4 --threads 1"


def run_tool(model: Path, prompts: Path, out: Path, *options: str) -> Any:
    """Measured on the prompts whose greedy answers it learns by heart: every other one, the first is left apart."""
    learnt = prompts.with_name("learnt.jsonl")
    learnt.write_text("".join(prompts.read_text().splitlines(keepends=True)[2::2]))
    files = map(str, (TOOL, model, "--prompts", prompts, "--held-out", learnt, "--out", out))
    return run_forked([*files, *SIZES.split(), *TIMES.split(), *options], dict(os.environ), timeout=600)


@pytest.fixture(scope="module")
def trained(golden: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Serving must find again what training saw: positions, taps, masks."""
    folder = tmp_path_factory.mktemp("trained")
    out = folder / "drafter"
    done = run_tool(
        golden / "tiny-qwen35moe-Q8_0.gguf", prompts_file(folder), out, "--steps", "60", "--mask", str(MASK)
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def told(folder: Path) -> Any:
    return json.loads((folder / "training.json").read_text())


def test_the_loss_falls_and_the_drafter_knows_the_answers(trained: Path) -> None:
    curve, rows = told(trained)["curve"], told(trained)["rows"]
    assert curve[-1]["loss"] < curve[0]["loss"] / 4
    assert rows["cold"]["accepted length"] > 4  # of 6


def test_its_folder_has_the_public_layout(trained: Path) -> None:
    spec = open_drafter(trained).spec
    assert (spec.taps, spec.mask, spec.block, len(spec.layers)) == ((1, 4, 6), MASK, 6, 2)
    config = json.loads((trained / "config.json").read_text())
    assert config["dflash_config"] == {"mask_token_id": MASK, "target_layer_ids": [1, 4, 6]}


def test_answers_are_those_without_it_and_lengths_are_the_same_wherever_it_runs(trained: Path) -> None:
    rows = told(trained)["rows"]
    assert all(row["answers unlike plain ones"] == 0 for row in rows.values())
    whole = [rows[name] for name in ("cold", "RAM", "disk", "disk_two_stages", "cold_two_stages")]
    assert len({(row["accepted length"], row["blocks"]) for row in whole}) == 1
    restored = {name for name in rows if rows[name]["restored"]}
    assert {"RAM", "disk", "disk_two_stages"} <= restored and not {"cold", "cold_two_stages"} & restored


def test_the_forward_that_learns_is_that_of_the_equations() -> None:
    spec = DrafterSpec(
        hidden=32, heads=4, kv_heads=2, head_dim=16, width=48, vocab=50, layers=(DraftLayer(None, False),) * 2,
        block=5, mask=49, taps=(0, 2), rope_theta=1e6, eps=1e-6,
    )  # fmt: skip
    weights, dice = random_weights(spec), torch.Generator().manual_seed(2)
    embedding = torch.randn(50, 32, generator=dice)
    drafter = Drafter(spec, weights, embedding, embedding)
    features, anchors = torch.randn(2, 30, 64, generator=dice), torch.tensor([[7, 30, 1], [12, 29, 13]])
    tokens = torch.randint(0, 49, anchors.shape, generator=dice)
    rows = drafter.rows(features, anchors, tokens)
    for text, block in np.ndindex(2, 3):
        at, ids = int(anchors[text, block]), [int(tokens[text, block]), *[spec.mask] * 4]
        context = naive.context_rows(spec, weights, features[text, :at])
        expected = naive.draft_rows(spec, weights, context, embedding[ids], at)
        torch.testing.assert_close(rows[text, block], expected, atol=1e-4, rtol=1e-4)


def test_blocks_begin_in_answers_and_end_with_their_texts() -> None:
    """Two texts: positions [0, 20), written from 12 on, and [20, 31), from 30 on."""
    edges = [torch.tensor(each) for each in ([0, 20], [12, 30], [20, 31])]
    corpus = Corpus(torch.arange(31), torch.arange(31.0)[:, None], *edges)
    blocks = draw_blocks(corpus, torch.tensor([1, 0]), 400, 4, torch.Generator().manual_seed(0))
    assert set(blocks.anchors[1].tolist()) == set(range(11, 19)) and set(blocks.anchors[0].tolist()) == {9}
    assert torch.equal(blocks.tokens[..., 0], blocks.anchors + torch.tensor([[20], [0]]))
    assert blocks.exist[0, 0].tolist() == [True, True, False, False]
    assert all(kept.sum() == min(4, 20 - at) for kept, at in zip(blocks.exist[1], blocks.anchors[1], strict=True))
    assert torch.equal(blocks.features[1, :, 0], torch.arange(18.0))


@pytest.mark.parametrize(
    ("line", "options", "said"),
    [
        ({"text": "?"}, ("--mask", "2019"), "line 5 has neither messages with roles nor a prompt"),
        ({"messages": [{"role": "assistant", "content": "?"}]}, ("--mask", "2019"), "line 5 asks nothing"),
        ({"prompt": "?"}, (), "has no token <|mask|>; --mask names one"),
        ({"prompt": "?"}, ("--mask", "2019", "--block", "17"), "--block is not 2 to 16"),
        ({"prompt": "?"}, ("--mask", "2019", "--taps", "1,8"), "reads the outputs of layers [1, 8]"),
    ],
)
def test_bad_input_is_one_sentence(
    golden: Path, tmp_path: Path, line: Any, options: tuple[str, ...], said: str
) -> None:
    done = run_tool(golden / "tiny-qwen35-f16.gguf", prompts_file(tmp_path, line), tmp_path / "out", *options)
    assert done.returncode == 1 and said in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


def test_answers_of_given_conversations_are_learnt_too(golden: Path, tmp_path: Path) -> None:
    """From where the prompt ends to the end, or to the context limit; a conversation without an answer is left out."""
    model = open_model(golden / "tiny-qwen35-f16.gguf")
    assert model.template is not None
    asked, answered = {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because it rains."}
    path = tmp_path / "given.jsonl"
    path.write_text("".join(json.dumps({"messages": turns}) + "\n" for turns in ([asked, answered], [asked])))
    prompt = model.template.render([asked]).tokens
    for context in (64, len(prompt) + 2):
        texts = given_texts(Target(model, "cpu", context, 4), path)
        assert [text.written <= len(prompt) for text in texts] == [True] and len(texts[0].tokens) <= context
    whole = model.tokenizer.decode(given_texts(Target(model, "cpu", 64, 4), path)[0].tokens, skip_control=False)
    assert "Because it rains.<|im_end|>" in whole


def test_texts_may_come_as_tokens(golden: Path, tmp_path: Path) -> None:
    path, target = tmp_path / "given.jsonl", Target(open_model(golden / "tiny-qwen35-f16.gguf"), "cpu", 16, 1)
    path.write_text('{"tokens": [5, 6, 7], "written": 2}\n')
    assert given_texts(target, path) == [Text((5, 6, 7), 2)]
    for given in ('[5, 6], "written": 2', '"5", "written": 1', '[5, -6], "written": 1', "[5, 6]"):
        path.write_text(f'{{"tokens": {given}}}')
        with pytest.raises(BadConfig, match="line 1: "):
            given_texts(target, path)


def test_the_weights_that_do_best_on_other_texts_stay(tmp_path: Path) -> None:
    """Of two texts the first is only looked at: what is learnt of the second makes it worse. They are in the folder
    before the training ends."""
    spec = DrafterSpec(
        hidden=32, heads=4, kv_heads=2, head_dim=16, width=48, vocab=50, layers=(DraftLayer(None, False),),
        block=4, mask=49, taps=(0,), rope_theta=1e6, eps=1e-6,
    )  # fmt: skip
    dice = torch.Generator().manual_seed(2)
    embedding = torch.randn(50, 32, generator=dice)
    weights = {name: value.clone().requires_grad_() for name, value in random_weights(spec).items()}
    edges = [torch.tensor(each) for each in ([0, 30], [5, 35], [30, 60])]
    corpus = Corpus(torch.randint(0, 49, (60,), generator=dice), torch.randn(60, 32, generator=dice), *edges)
    options = argparse.Namespace(
        texts=1, blocks=8, rate=1e-2, train=1e9, steps=60, decay=4.0, keep="best", out=tmp_path
    )
    drafter = Drafter(spec, weights, embedding, embedding)
    curve = train(drafter, corpus, options, torch.Generator().manual_seed(3), layers=4)
    looked_at = draw_blocks(corpus, torch.arange(1), 8, spec.block, torch.Generator().manual_seed(3))
    lengths = [row["unseen length"] for row in curve]
    with torch.no_grad():
        loss, length = drafter.learn(looked_at, 4.0)
    first_best = curve[lengths.index(max(lengths))]
    assert (float(length), float(loss)) == (first_best["unseen length"], first_best["unseen loss"])
    assert first_best is not curve[-1]
    stored = open_drafter(tmp_path)
    assert all(
        torch.equal(torch.from_numpy(stored.values(name)), w.detach().half().float()) for name, w in weights.items()
    )


def test_a_drafter_is_measured_by_itself(trained: Path, golden: Path, tmp_path: Path) -> None:
    tool, prompts = Path(measure_drafter.__file__), prompts_file(tmp_path)
    prompts.write_text("".join(prompts.read_text().splitlines(keepends=True)[2:5:2]))
    model = golden / "tiny-qwen35moe-Q8_0.gguf"
    arguments = (tool, model, trained, "--prompts", prompts, "--longest", "12", "--context", "128", "--threads", "1")
    done = run_forked(list(map(str, arguments)), dict(os.environ), timeout=600)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout.splitlines()[-1])
    assert rows["plain"]["blocks"] == 0 and rows["cold"]["accepted length"] > 3 and rows["served"]["tokens"]


def test_a_training_goes_on_from_an_earlier_one(golden: Path, trained: Path, tmp_path: Path) -> None:
    model, prompts = golden / "tiny-qwen35moe-Q8_0.gguf", prompts_file(tmp_path)
    mine = "--steps", "1", "--mask", str(MASK), "--start", str(trained), "--rate", "0"
    done = run_tool(model, prompts, tmp_path / "more", *mine)
    assert done.returncode == 0, done.stdout + done.stderr
    before, after = open_drafter(trained), open_drafter(tmp_path / "more")
    assert all(np.array_equal(before.values(name), after.values(name)) for name in before.tensors)
    other = run_tool(model, prompts, tmp_path / "other", *mine, "--layers", "3")
    assert other.returncode == 1 and "is to be trained" in other.stderr
