"""Train a DFlash drafter for a model, on text that the model writes itself.

    PYTHONPATH=src python tools/train_drafter.py MODEL --prompts chats.jsonl --held-out others.jsonl --out FOLDER

A line of such a file is {"messages": [...]}, which is cut after the last turn that is not the assistant's,
{"prompt": "text"}, or {"tokens": [...], "written": N}, whose tokens from the N-th on are an answer. There are four
steps:

1. The target answers prompts, many at once, three of four greedily, for --write seconds. Conversations with answers
   (--text) come on top; they take less time, and say less about how the target goes on.
2. Its layers run over the texts once more and hand out features, as they do while serving; the features are kept.
3. The drafter learns, for --train seconds or --steps steps. Some positions of every answer are anchors: from the token
   there and from the features before it the drafter fills in the masks behind it. Near rows weigh more, since a token
   counts only where all before it were right. The target's embedding and head are shared and stay as they are. The
   weights that did best on texts which are set aside are kept: with little text the last ones know it by heart.
4. The folder is written as `--drafter` opens it, and measure_drafter.py measures it on the held-out prompts, if any.

The table comes last, and is in FOLDER too, with the course of the training. For a model of 60 M parameters with learned
routing this took six minutes on an H200; what it has learnt can go on with other texts (--start):

    PYTHONPATH=src python3 tools/train_drafter.py demo-moe-Q4_K_M.gguf --device cuda:0 --out drafter --taps 1,4,7,10 \
        --prompts prompts.jsonl --sequences 1024 --context 768 --write 70 --layers 5 --texts 128 --blocks 32 --train 220
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from measure_drafter import Row, Target, entries, evaluate, parser_of, table, target_of, tokens_of, turns_of
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import cross_entropy, linear, rms_norm, scaled_dot_product_attention, silu

from rekindle.batch import Batch, Segment, Wanted
from rekindle.errors import BadConfig, RekindleError
from rekindle.placement import pages_for
from rekindle.prompt import Prompt, common_length
from rekindle.speculative.files import LAYER_OURS, OURS, open_drafter
from rekindle.speculative.spec import DrafterSpec, DraftLayer, default_taps
from rekindle.speculative.width import MOST

Weights = dict[str, Tensor]
TEMPERATURE, MIN_P = 0.7, 0.05  # of answers that are drawn
TOGETHER = 64  # prompts or texts of one forward, at most
CURVE = "step", "seconds", "loss", "length", "unseen loss", "unseen length"


# 1. Text


@dataclass(frozen=True, slots=True)
class Text:
    tokens: tuple[int, ...]
    written: int  # position from which on it is an answer


@dataclass(slots=True)
class Writing:
    """An answer under way."""

    number: int  # of its prompt
    tokens: list[int]  # of the prompt and of the answer so far
    written: int
    consumed: int = 0  # tokens that the slot's state holds


def write_texts(target: Target, prompts: Iterator[Prompt], seconds: float, longest: int) -> list[Text]:
    """Prompts are answered until the time is over, by steps of the stage itself: with a thousand answers at once, most
    of the time would go to what an engine does for each token. Three of four answers are greedy, the others drawn."""
    stage, until = target.stage(target.model.spec.whole, pages_for(target.context)), time.monotonic() + seconds
    dice, stops = torch.Generator(target.device).manual_seed(0), target.model.tokenizer.stop_ids
    numbered, free = enumerate(prompts), list(range(target.sequences))
    texts, live = dict[int, Text](), dict[int, Writing]()  # by number, by slot

    def step(slots: Sequence[int]) -> None:
        asked = [(slot, live[slot]) for slot in slots]
        segments = (Segment(slot, w.consumed, tuple(w.tokens[w.consumed :]), Wanted.LAST) for slot, w in asked)
        logits = stage.forward(Batch(tuple(segments)), None).logits
        assert logits is not None, "a whole model gives logits"
        drawn = draw(logits, [writing.number for _, writing in asked], dice)
        for (slot, writing), token in zip(asked, drawn, strict=True):
            writing.consumed = len(writing.tokens)
            writing.tokens.append(token)
            if token in stops or len(writing.tokens) == writing.written + longest:
                texts[writing.number] = Text(tuple(writing.tokens), writing.written)
                stage.close(slot)
                free.append(slot)
                del live[slot]

    while True:
        running, together = list(live), min(TOGETHER, target.sequences)
        while len(free) >= together and time.monotonic() < until and (group := list(islice(numbered, together))):
            new = [free.pop() for _ in group]
            for slot, (number, prompt) in zip(new, group, strict=True):
                stage.open(slot)
                live[slot] = Writing(number, list(prompt.tokens), len(prompt.tokens))
            step(new)
        if running:
            step(running)
        elif not live:
            stage.stop()
            return [texts[number] for number in sorted(texts)]


def draw(logits: Tensor, numbers: Sequence[int], dice: torch.Generator) -> list[int]:
    """A token for every row, greedily in three of four texts."""
    chances = (logits / TEMPERATURE).softmax(-1)
    chances = chances.where(chances >= MIN_P * chances.amax(-1, keepdim=True), 0)
    drawn, greedy = torch.multinomial(chances, 1, generator=dice)[:, 0], logits.argmax(-1)
    return torch.where(torch.tensor(numbers, device=drawn.device) % 4 == 3, drawn, greedy).tolist()


def given_texts(target: Target, path: Path) -> list[Text]:
    """Conversations as they stand, up to the context limit; the last answer counts as written."""
    texts = list[Text]()
    for entry, where in entries(path):
        if isinstance(entry, dict) and "tokens" in entry:
            tokens, written = tokens_of(entry, where, target)
            texts.append(Text(tokens[: target.context], written))
            continue
        whole = target.template(where).render(turns_of(entry, where), add_generation_prompt=False).tokens
        written = common_length(whole, target.prompt(entry, where).tokens)
        if written < min(len(whole), target.context):
            texts.append(Text(whole[: target.context], written))
    return texts


# 2. Features


@dataclass(frozen=True, slots=True)
class Corpus:
    """All texts, one behind the other."""

    tokens: Tensor  # int64 [positions]
    features: Tensor  # [positions, taps · hidden], bfloat16: residual streams outgrow float16
    first: Tensor  # int64 [texts]: where each begins,
    written: Tensor  # where its answer begins, and
    stop: Tensor  # where it ends


def make_corpus(target: Target, texts: Sequence[Text], taps: tuple[int, ...], store: Path | None) -> Corpus:
    """store: a file that holds the features; None: the device's memory does."""
    device, lengths = torch.device(target.device), torch.tensor([len(text.tokens) for text in texts])
    shape = int(lengths.sum()), len(taps) * target.model.spec.hidden
    if store is None:
        features = torch.empty(shape, dtype=torch.bfloat16, device=device)
    else:
        features = torch.from_file(str(store), True, shape[0] * shape[1], dtype=torch.bfloat16).view(shape)
    stage, row = target.stage(target.model.spec.whole), 0
    together = min(TOGETHER, target.sequences)
    for start in range(0, len(texts), together):
        group = texts[start : start + together]
        for slot in range(len(group)):
            stage.open(slot)
        segments = (Segment(slot, 0, text.tokens, features=len(text.tokens)) for slot, text in enumerate(group))
        found = torch.cat(stage.forward(Batch(tuple(segments), taps=taps), None).features, dim=-1)
        features[row : row + len(found)] = found.to(features)
        row += len(found)
        for slot in range(len(group)):
            stage.close(slot)
    stage.stop()
    tokens = torch.tensor([token for text in texts for token in text.tokens], device=device)
    first = lengths.cumsum(0) - lengths
    written = first + torch.tensor([text.written for text in texts])
    return Corpus(tokens, features, *(edge.to(device) for edge in (first, written, first + lengths)))


# 3. Training


@dataclass(frozen=True, slots=True)
class Blocks:
    """Some blocks of each of some texts."""

    features: Tensor  # [texts, positions, taps · hidden]; behind a text's end anything
    anchors: Tensor  # [texts, blocks]: position of the last known token
    tokens: Tensor  # [texts, blocks, rows of a block]: it, and those to be found
    exist: Tensor  # the same shape: whether the text goes so far


def draw_blocks(corpus: Corpus, picks: Tensor, blocks: int, size: int, dice: torch.Generator) -> Blocks:
    """Anchors are positions of an answer, or right before it, whose next token is known."""
    first, written, stop = corpus.first[picks], corpus.written[picks], corpus.stop[picks]
    chances = torch.rand(len(picks), blocks, generator=dice).to(picks.device)
    anchors = written[:, None] - 1 + (chances * (stop - written)[:, None]).long()
    rows = anchors[..., None] + torch.arange(size, device=picks.device)
    exist = rows < stop[:, None, None]
    length = int((anchors.amax(1) - first).amax())
    context = (first[:, None] + torch.arange(length, device=picks.device)).clamp(max=len(corpus.tokens) - 1)
    features = corpus.features[context.to(corpus.features.device)].to(picks.device)
    return Blocks(features, anchors - first[:, None], corpus.tokens[rows.clamp(max=len(corpus.tokens) - 1)], exist)


@dataclass(frozen=True, slots=True)
class Drafter:
    """speculative/naive.py has the equations; here many blocks of many texts pass at once, and gradients flow."""

    spec: DrafterSpec
    weights: Weights
    embedding: Tensor  # the target's, [vocab, hidden]
    head: Tensor  # the target's, [drawable, hidden]

    def rows(self, features: Tensor, anchors: Tensor, tokens: Tensor) -> Tensor:
        """features [texts, positions, taps · hidden]; anchors and the tokens there [texts, blocks] -> rows after the
        final norm [texts, blocks, rows of a block, hidden]."""
        spec, w = self.spec, self.weights
        context = self._norm(linear(features, w["fc.weight"]), "context_norm")
        ids = torch.full((*anchors.shape, spec.block), spec.mask, device=anchors.device)
        ids[..., 0] = tokens
        h = self.embedding[ids].flatten(1, 2)
        at = (anchors[..., None] + torch.arange(spec.block, device=anchors.device)).flatten(1)
        places = torch.arange(context.shape[1], device=at.device).expand(len(at), -1)
        angles, visible = self._angles(torch.cat((places, at), dim=1)), self._visible(anchors, places)
        for layer in range(len(spec.layers)):
            h = h + self._attention(f"blk.{layer}", context, self._norm(h, f"blk.{layer}.attn_norm"), angles, visible)
            n = self._norm(h, f"blk.{layer}.ffn_norm")
            gate, up, down = (w[f"blk.{layer}.ffn_{name}.weight"] for name in ("gate", "up", "down"))
            h = h + linear(silu(linear(n, gate)) * linear(n, up), down)
        return self._norm(h, "output_norm").unflatten(1, (-1, spec.block))

    def _attention(self, blk: str, context: Tensor, n: Tensor, angles: Tensor, visible: Tensor) -> Tensor:
        w, both = self.weights, torch.cat((context.to(n.dtype), n), dim=1)
        q = self._turned(linear(n, w[f"{blk}.attn_q.weight"]), f"{blk}.attn_q_norm", angles[:, -n.shape[1] :])
        k = self._turned(linear(both, w[f"{blk}.attn_k.weight"]), f"{blk}.attn_k_norm", angles)
        v = linear(both, w[f"{blk}.attn_v.weight"]).unflatten(-1, (-1, self.spec.head_dim)).transpose(1, 2)
        mixed = scaled_dot_product_attention(q.to(v), k.to(v), v, attn_mask=visible, enable_gqa=True)
        return linear(mixed.transpose(1, 2).flatten(2), w[f"{blk}.attn_output.weight"])

    def _visible(self, anchors: Tensor, places: Tensor) -> Tensor:
        """[texts, 1, rows, positions + rows]: a block sees what stands before its anchor, and itself."""
        blocks, size = anchors.shape[1], self.spec.block
        before = (places[:, None] < anchors[..., None]).repeat_interleave(size, dim=1)
        own = torch.eye(blocks, dtype=torch.bool, device=anchors.device)
        own = own.repeat_interleave(size, dim=0).repeat_interleave(size, dim=1).expand(len(anchors), -1, -1)
        return torch.cat((before, own), dim=-1)[:, None]

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight = self.weights[f"{name}.weight"]
        return rms_norm(x.float(), weight.shape, weight, self.spec.eps)

    def _angles(self, positions: Tensor) -> Tensor:
        half = self.spec.head_dim // 2
        speeds = self.spec.rope_theta ** (-torch.arange(half, dtype=torch.float64, device=positions.device) / half)
        return (positions.double()[..., None] * speeds).float()

    def _turned(self, x: Tensor, norm: str, angles: Tensor) -> Tensor:
        """Per-head norm, then rotary positions -> [texts, heads, rows, dim]."""
        x = self._norm(x.unflatten(-1, (-1, self.spec.head_dim)), norm).transpose(1, 2)
        a, b = x.chunk(2, dim=-1)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)

    def learn(self, blocks: Blocks, decay: float) -> tuple[Tensor, Tensor]:
        """The loss, and the mean accepted length if the target wrote these texts again."""
        wanted, exist = blocks.tokens[..., 1:], blocks.exist[..., 1:]
        with torch.autocast(wanted.device.type, torch.bfloat16):
            rows = self.rows(blocks.features, blocks.anchors, blocks.tokens[..., 0])[:, :, 1:]
            logits = linear(rows[exist], self.head).float()
        weight = torch.exp(-torch.arange(wanted.shape[2], device=wanted.device) / decay).expand(exist.shape)[exist]
        loss = (cross_entropy(logits, wanted[exist], reduction="none") * weight).sum() / weight.sum()
        right = torch.zeros_like(exist).masked_scatter(exist, logits.argmax(-1) == wanted[exist])
        return loss, 1 + right.cumprod(-1).sum(-1).float().mean()


def make_spec(target: Target, options: argparse.Namespace) -> DrafterSpec:
    spec, mask = target.model.spec, options.mask
    if mask is None:
        mask = target.model.tokenizer.id_of("<|mask|>")
    if mask is None:
        raise BadConfig(f"{spec.name} has no token <|mask|>; --mask names one that texts do not hold")
    if options.heads % options.kv_heads or options.head_dim % 2 or not 2 <= options.block <= MOST + 1:
        raise BadConfig(f"--heads are no multiple of --kv-heads, --head-dim is odd or --block is not 2 to {MOST + 1}")
    taps = tuple(map(int, options.taps.split(","))) if options.taps else default_taps(spec.layers)
    made = DrafterSpec(
        hidden=spec.hidden, heads=options.heads, kv_heads=options.kv_heads, head_dim=options.head_dim,
        width=options.width or 2 * spec.hidden, vocab=spec.vocab, block=options.block, mask=mask,
        layers=(DraftLayer(None, causal=False),) * options.layers, taps=tuple(sorted(set(taps))),
        rope_theta=1e6, eps=1e-6,
    )  # fmt: skip
    made.check_target(spec, "the drafter")
    return made


def first_weights(spec: DrafterSpec, dice: torch.Generator) -> Weights:
    weights = {
        name: torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=dice) * shape[1] ** -0.5
        for name, shape in spec.tensors().items()
    }
    for layer in range(len(spec.layers)):  # at first every layer changes little
        for name in ("attn_output", "ffn_down"):
            weights[f"blk.{layer}.{name}.weight"] *= 0.1
    return weights


def earlier_weights(folder: Path, spec: DrafterSpec) -> Weights:
    file = open_drafter(folder)
    if file.spec != spec:
        raise BadConfig(f"{folder} holds a drafter {file.spec}, and one like {spec} is to be trained")
    return {name: torch.from_numpy(file.values(name).copy()) for name in spec.tensors()}


def make_drafter(target: Target, spec: DrafterSpec, weights: Weights) -> Drafter:
    device, file = torch.device(target.device), target.model.file
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    embedding = torch.from_numpy(file.values("token_embd.weight")).to(device, dtype)
    head = embedding if file.spec.tied else torch.from_numpy(file.values("output.weight")).to(device, dtype)
    weights = {name: tensor.to(device).requires_grad_() for name, tensor in weights.items()}
    return Drafter(spec, weights, embedding, head[: file.spec.drawable])


def train(
    drafter: Drafter, corpus: Corpus, options: argparse.Namespace, dice: torch.Generator, layers: int
) -> list[Row]:
    """layers: of the target. The first texts, one in fifty, are only looked at; the weights that do best on them are
    those that stay."""
    texts, device = len(corpus.first), corpus.first.device
    apart = min(64, 1 + texts // 50)
    if texts - apart < options.texts:
        raise BadConfig(f"{texts} texts were written, and {apart + options.texts} are needed: --write, --texts")
    unseen = draw_blocks(corpus, torch.arange(apart, device=device), options.blocks, drafter.spec.block, dice)
    weights, optimisers = list(drafter.weights.values()), make_optimisers(drafter)
    began, curve, step, done = time.monotonic(), list[Row](), 0, 0.0
    best, kept = 0.0, [weight.detach().clone() for weight in weights]
    while done < 1:
        for optimiser in optimisers:
            optimiser.param_groups[0]["lr"] = options.rate * rate_at(done)
        picks = apart + torch.randperm(texts - apart, generator=dice)[: options.texts].to(device)
        blocks = draw_blocks(corpus, picks, options.blocks, drafter.spec.block, dice)
        loss, length = drafter.learn(blocks, options.decay)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        for optimiser in optimisers:
            optimiser.step()
            optimiser.zero_grad()
        step, seconds = step + 1, time.monotonic() - began
        done = max(step / options.steps, seconds / options.train)
        if 20 * done >= len(curve) + 1:
            with torch.no_grad():
                other = drafter.learn(unseen, options.decay)
            numbers = step, seconds, *(each.item() for each in (loss, length, *other))
            curve.append(dict(zip(CURVE, numbers, strict=True)))
            if curve[-1]["unseen length"] > best:
                best, kept = curve[-1]["unseen length"], [weight.detach().clone() for weight in weights]
                save(drafter, options.out, layers)  # so that a training which is cut short leaves something
            print("  ".join(f"{name} {value:.4g}" for name, value in curve[-1].items()), flush=True)
    if options.keep == "best":
        with torch.no_grad():
            for weight, value in zip(weights, kept, strict=True):
                weight.copy_(value)
    return curve


def make_optimisers(drafter: Drafter) -> tuple[torch.optim.Optimizer, ...]:
    """Muon takes fewer steps than AdamW, and is for matrices alone."""
    matrices, norms = ([w for w in drafter.weights.values() if w.ndim == ndim] for ndim in (2, 1))
    muon = torch.optim.Muon(matrices, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    return muon, torch.optim.AdamW(norms, betas=(0.9, 0.95), weight_decay=0.0)


def rate_at(done: float) -> float:
    """Share of the learning rate when so much of the training is over: it rises, then falls by a cosine."""
    return min(1.0, 0.02 + done / 0.04, 0.5 + 0.5 * math.cos(math.pi * done))


# 4. The folder, and what an engine makes of it


def save(drafter: Drafter, folder: Path, layers: int) -> None:
    """layers: of the target."""
    spec = drafter.spec
    folder.mkdir(parents=True, exist_ok=True)
    theirs = {ours: name for name, ours in (*OURS.items(), *LAYER_OURS.items())}

    def named(name: str) -> str:
        blk, _, rest = name.partition(".")
        return f"layers.{rest.partition('.')[0]}.{theirs[rest.partition('.')[2]]}" if blk == "blk" else theirs[name]

    stored = {named(name): weight.detach().half().cpu().contiguous() for name, weight in drafter.weights.items()}
    save_file(stored, folder / "model.safetensors")
    config = {
        "architectures": ["DFlashDraftModel"], "hidden_size": spec.hidden, "num_hidden_layers": len(spec.layers),
        "num_attention_heads": spec.heads, "num_key_value_heads": spec.kv_heads, "head_dim": spec.head_dim,
        "intermediate_size": spec.width, "vocab_size": spec.vocab, "rms_norm_eps": spec.eps,
        "rope_theta": spec.rope_theta, "block_size": spec.block, "num_target_layers": layers,
        "layer_types": ["full_attention"] * len(spec.layers),
        "dflash_config": {"mask_token_id": spec.mask, "target_layer_ids": list(spec.taps)},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def main() -> None:
    options = parse()
    dice, target = torch.Generator().manual_seed(0), target_of(options)
    spec = make_spec(target, options)
    held_out = list(target.prompts(options.held_out, options.longest)) if options.held_out else []
    prompts = target.prompts(options.prompts, options.longest)
    texts = write_texts(target, prompts, options.write, options.longest) if options.write else []
    print(f"{len(texts)} texts, {sum(len(text.tokens) - text.written for text in texts)} tokens written", flush=True)
    if options.text:
        texts += given_texts(target, options.text)
    corpus = make_corpus(target, texts, spec.taps, options.store)
    first = earlier_weights(options.start, spec) if options.start else first_weights(spec, dice)
    drafter = make_drafter(target, spec, first)
    curve = train(drafter, corpus, options, dice, target.model.spec.layers)
    save(drafter, options.out, target.model.spec.layers)
    rows = evaluate(target, options.out, held_out, options.longest) if held_out else {}
    (options.out / "training.json").write_text(json.dumps({"curve": curve, "rows": rows}))
    if rows:
        (options.out / "table.md").write_text(table(rows) + "\n")
        print(table(rows))


def parse() -> argparse.Namespace:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--held-out", type=Path, help="JSON lines, for the table at the end; without it none is made")
    add("--out", type=Path, required=True, help="the folder to write")
    add("--start", type=Path, help="a folder that an earlier training wrote, to go on from there")
    add("--text", type=Path, help="JSON lines with answers, to learn from as they stand, beside what the target writes")
    add("--store", type=Path, help="a file for features; without it they stay in the device's memory")
    add("--write", type=float, default=300, help="seconds in which prompts are answered; 0: --text is all there is")
    add("--train", type=float, default=600, help="seconds of training at most")
    add("--steps", type=int, default=1 << 30, help="of training at most")
    add("--layers", type=int, default=3)
    add("--heads", type=int, default=4)
    add("--kv-heads", type=int, default=2)
    add("--head-dim", type=int, default=128)
    add("--width", type=int, help="of the feed-forward part; twice the target's rows, unless said")
    add("--block", type=int, default=8, help="tokens of a block, the known one included")
    add("--taps", help="layers whose outputs are read, as 1,4,7; five of them, evenly, unless said")
    add("--mask", type=int, help="token id; that of <|mask|> unless said")
    add("--texts", type=int, default=8, help="of one step")
    add("--blocks", type=int, default=16, help="of each text in a step")
    add("--rate", type=float, default=2e-3, help="of learning, at most")
    add("--keep", choices=("best", "last"), default="best", help="the weights that do best on other texts, or the last")
    add("--decay", type=float, default=4.0, help="rows after which a row weighs 1/e")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        main()
    except RekindleError as error:
        sys.exit(f"train_drafter: {error}")
