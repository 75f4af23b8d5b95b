"""`rekindle launch`: a coding agent that talks to this server, for one run; its own settings stay as they are."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any
from urllib.parse import urlencode

import typer
from rich.console import Console

from rekindle.bench.replay import OwnServer
from rekindle.cli.serve import KEY_VARIABLE
from rekindle.errors import BadConfig

DEFAULT_URL = "http://127.0.0.1:8080"
NO_KEY = "rekindle"  # clients want a key where the server wants none
ANSWER = 5.0  # seconds that a server has to list its models
LONGEST_ANSWER = 32_768  # tokens that a client is told it may ask for


class Agent(StrEnum):
    CLAUDE = "claude"
    CODEX = "codex"
    OPENCODE = "opencode"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server that runs, and the model on it."""

    url: str
    model: str
    context: int  # tokens
    key: str | None  # None: the server asks for none


@dataclass(frozen=True, slots=True)
class Start:
    """How a client is started."""

    command: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    unset: tuple[str, ...] = ()  # variables that would lead the client elsewhere

    def in_words(self) -> str:
        """For a shell."""
        lines = [f"unset {name}" for name in self.unset]
        lines += [f"export {name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return "\n".join([*lines, shlex.join(self.command)])


def claude(server: Endpoint) -> Start:
    """One model for everything. Its prompts carry neither a billing line nor a count of tokens left, which would change
    on every call."""
    models = ("ANTHROPIC_MODEL", "ANTHROPIC_SMALL_FAST_MODEL", "CLAUDE_CODE_SUBAGENT_MODEL")
    tiers = tuple(f"ANTHROPIC_DEFAULT_{tier}_MODEL" for tier in ("OPUS", "SONNET", "HAIKU"))
    environment = {
        "ANTHROPIC_BASE_URL": server.url,
        "ANTHROPIC_AUTH_TOKEN": server.key or NO_KEY,
        **dict.fromkeys((*models, *tiers), server.model),
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        "CLAUDE_CODE_TOTAL_TOKENS_REMINDER": "off",
        "CLAUDE_CODE_AUTO_COMPACT_WINDOW": str(server.context),
    }
    return Start(["claude"], environment, unset=("ANTHROPIC_API_KEY",))


def codex(server: Endpoint) -> Start:
    """By options of its command line, so that CODEX_HOME stays untouched."""
    provider = {"name": "Rekindle", "base_url": f"{server.url}/v1", "wire_api": "responses"}
    environment = {}
    if server.key is not None:
        provider["env_key"] = KEY_VARIABLE
        environment[KEY_VARIABLE] = server.key
    table = ", ".join(f"{name}={json.dumps(value)}" for name, value in provider.items())
    options = {
        "model": json.dumps(server.model),
        "model_provider": '"rekindle"',
        "model_providers.rekindle": f"{{{table}}}",
        "model_context_window": str(server.context),
    }
    return Start(["codex", *(word for pair in options.items() for word in ("-c", "=".join(pair)))], environment)


def opencode(server: Endpoint) -> Start:
    limit = {"context": server.context, "output": min(LONGEST_ANSWER, server.context // 2)}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "Rekindle",
        "options": {"baseURL": f"{server.url}/v1", "apiKey": server.key or NO_KEY},
        "models": {server.model: {"name": server.model, "limit": limit}},
    }
    model = f"rekindle/{server.model}"
    config = {"provider": {"rekindle": provider}, "model": model, "small_model": model}
    return Start(["opencode"], {"OPENCODE_CONFIG_CONTENT": json.dumps(config)})


AGENTS: dict[Agent, tuple[Callable[[Endpoint], Start], str]] = {
    Agent.CLAUDE: (claude, "npm install -g @anthropic-ai/claude-code"),
    Agent.CODEX: (codex, "npm install -g @openai/codex"),
    Agent.OPENCODE: (opencode, "npm install -g opencode-ai"),
}


def launch(
    agent: Annotated[Agent, typer.Argument(help="The coding agent to start.")],
    arguments: Annotated[list[str] | None, typer.Argument(help="Words for the agent, after --.")] = None,
    url: Annotated[str, typer.Option(help="A server that runs.")] = DEFAULT_URL,
    model: Annotated[str | None, typer.Option(help="The model to ask for; the server's first if left out.")] = None,
    serve: Annotated[
        str | None, typer.Option(help="Start a server with these words, such as 'MODEL.gguf', and stop it afterwards.")
    ] = None,
    only_print: Annotated[bool, typer.Option("--print", help="Show the settings and start nothing.")] = False,
) -> None:
    """Start a coding agent that talks to this server. Its key is taken from REKINDLE_API_KEY."""
    make, how_to_install = AGENTS[agent]
    if not only_print and shutil.which(agent) is None:
        raise BadConfig(f"{agent} is not installed, or not on PATH: {how_to_install}")
    with _server(serve, url) as address:
        server = find_server(address, os.environ.get(KEY_VARIABLE), model)
        if not takes_tools(server):
            said = f"{server.model} takes no tools: its chat template has no place for them, so {agent} can do little"
            Console(stderr=True, soft_wrap=True).print(f"rekindle: {said}", markup=False, highlight=False)
        start = make(server)
        start.command.extend(arguments or ())
        if only_print:
            print(start.in_words())
            return
        code = _run(start)
    sys.exit(code)


@contextmanager
def _server(arguments: str | None, url: str) -> Iterator[str]:
    if arguments is None:
        yield url.rstrip("/").removesuffix("/v1")
        return
    server = OwnServer(shlex.split(arguments), os.environ.get(KEY_VARIABLE))
    try:
        yield server.url
    finally:
        server.stop()


def find_server(url: str, key: str | None, model: str | None) -> Endpoint:
    """The server at this address; the model must be one of its own."""
    try:
        cards: list[dict[str, Any]] = _asked(f"{url}/v1/models", key)["data"]
        contexts = {str(card["id"]): int(card["context_length"]) for card in cards}
    except urllib.error.HTTPError as error:
        if error.code not in (401, 403):
            raise BadConfig(f"{url} lists no models: {error}") from error
        how = f"it is taken from {KEY_VARIABLE}" if key is None else f"the one in {KEY_VARIABLE} is not one of its own"
        raise BadConfig(f"the server at {url} asks for a key: {how}") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadConfig(
            f"no server answers at {url} ({error}); 'rekindle serve MODEL' starts one, --url names another, "
            "and --serve 'MODEL' starts one for this run"
        ) from error
    name = model or next(iter(contexts))
    if name not in contexts:
        raise BadConfig(f"--model {name}: {url} serves {', '.join(contexts)}")
    return Endpoint(url, name, contexts[name], key)


def takes_tools(server: Endpoint) -> bool:
    """True where the server does not say."""
    try:
        said = _asked(f"{server.url}/props?{urlencode({'model': server.model})}", server.key)
    except (OSError, ValueError):
        return True
    return bool(said.get("takes_tools", True)) if isinstance(said, dict) else True


def _asked(url: str, key: str | None) -> Any:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key or NO_KEY}"})
    with urllib.request.urlopen(request, timeout=ANSWER) as answer:
        return json.load(answer)


def _run(start: Start) -> int:
    environment = {name: value for name, value in os.environ.items() if name not in start.unset} | start.environment
    process = subprocess.Popen(start.command, env=environment)
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:
            continue  # the agent got it too, and decides what it means
