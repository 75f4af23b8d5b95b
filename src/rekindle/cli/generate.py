"""`rekindle generate`: one prompt, one answer, on the terminal."""

from __future__ import annotations

import os
import queue
import sys
from pathlib import Path
from typing import Annotated

import typer

from rekindle.build import Built
from rekindle.cli import options
from rekindle.config import Config, printable
from rekindle.engine.types import Event, Failed, Finished, Request, Sampling, Token
from rekindle.errors import BadConfig
from rekindle.prompt import Prompt
from rekindle.text import Detokenizer, boundaries_of_tokens

MODEL_ENDINGS = (".gguf", ".safetensors")
PATH_BEGINNINGS = ("/", "./", "../", "~/")


def generate(
    model: Annotated[
        str | None, typer.Argument(help="A GGUF file or a Hugging Face folder; the embedded model if left out.")
    ] = None,
    prompt: Annotated[str | None, typer.Argument(help="What to say; read from standard input if left out.")] = None,
    raw: Annotated[bool, typer.Option(help="Continue the text instead of answering it as a message.")] = False,
    max_tokens: Annotated[int, typer.Option(min=1, help="The longest answer.")] = 512,
    temperature: Annotated[
        float, typer.Option(min=0.0, max=2.0, help="How random the draws are; 0 always takes the likeliest token.")
    ] = 0.0,
    top_p: Annotated[
        float, typer.Option(min=1e-6, max=1.0, help="Draw from the likeliest tokens that make up this probability.")
    ] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="Draw from this many of the likeliest tokens; 0: from all.")] = 0,
    seed: Annotated[int, typer.Option(min=0, max=2**53 - 1, help="Of the random draws.")] = 0,
    devices: options.Devices = "auto",
    split: options.Split = "auto",
    context: options.Context = None,
    dtype: options.Dtype = None,
    draft: options.Draft = options.DRAFT,
    drafter: options.Drafter = None,
    threads: options.Threads = None,
) -> None:
    """Answer one prompt. A single argument that is no file is the prompt, for the embedded model."""
    path, prompt = split_arguments(model, prompt)
    text = prompt if prompt is not None else sys.stdin.read()
    built = options.load_with_progress(
        Config(
            model=path,
            devices=options.names(devices),
            split=split,
            context=context,
            sequences=1,
            dtype=dtype,
            draft=draft,
            drafter=drafter,
            threads=threads,
        )
    )
    try:
        sampling = Sampling(temperature=temperature, top_p=top_p, top_k=top_k, seed=seed)
        _answer(built, _prompt(built, text, raw), sampling, max_tokens)
    finally:
        built.stop()


def split_arguments(first: str | None, second: str | None) -> tuple[Path | None, str | None]:
    """Model and prompt from one or two arguments. A single word that looks like a file, and is none, is an error."""
    if first is None or second is not None or os.path.exists(first):
        return Path(first) if first is not None else None, second
    if len(first.split()) == 1 and (first.endswith(MODEL_ENDINGS) or first.startswith(PATH_BEGINNINGS)):
        raise BadConfig(f"there is no file {first}; if it is a prompt, name the model before it")
    return None, first


def _prompt(built: Built, text: str, raw: bool) -> Prompt:
    template = built.model.template
    if raw or template is None:
        return boundaries_of_tokens(built.model.tokenizer.encode(text), built.model.tokenizer)
    return template.render([{"role": "user", "content": text}])


def _answer(built: Built, prompt: Prompt, sampling: Sampling, max_tokens: int) -> None:
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    tokenizer = built.model.tokenizer
    built.engine.submit(
        Request("generate", prompt, sampling, max_tokens, stop_tokens=tokenizer.stop_ids, sink=events.put)
    )
    detokenizer = Detokenizer(tokenizer)
    while True:
        match events.get():
            case Token(token=token):
                print(printable(detokenizer.push(token), keep="\n\t"), end="", flush=True)
            case Failed(error=error):
                raise error
            case Finished() as finished:
                print(printable(detokenizer.finish(), keep="\n\t"))
                _print_timings(finished)
                return


def _print_timings(finished: Finished) -> None:
    t, count = finished.timings, finished.completion_tokens
    speed = (count - 1) / t.decode if count > 1 and t.decode > 0 else 0.0
    print(
        f"[{finished.prompt_tokens} prompt tokens in {t.prefill:.2f} s; {count} tokens, {speed:.1f} per second; "
        f"ended by {finished.reason}]",
        file=sys.stderr,
    )
