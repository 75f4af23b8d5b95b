"""Many clients of two keys at once, a third of whom leave in the middle of their answers, for minutes.

    scripts/soak_clients.py [--clients 64] [--seconds 300] [--seed 0] [--model FILE]

All clients of both keys hold conversations that begin with the same documents, so what the one key computed would serve
the other. For every answer it is checked that no more was restored than the same key had sent before. Without --model a
tiny random model is written and served. The last line is JSON: answers, those cut short, tokens restored, prompts that
another key's snapshots would have served, memory after the first quarter and at the end, and faults: tokens restored
across keys, refusals, slots that stay taken, tracebacks. Exit status 1 if there is any, or if memory grew by a tenth.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import random
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np

from rekindle.bench.replay import OwnServer
from rekindle.bench.synth import write_synthetic
from rekindle.prompt import common_length

KEYS = {"alice": "alice's long secret", "bob": "bob's long secret"}
SERVE = ("--context", "1024", "--sequences", "8", "--threads", "1", "--cache-ram", "64MiB", "--cache-disk", "256MiB")
DOCUMENTS = 4
FRESH_SECONDS = 5.0
TURNS = 4
LEAVES = 1 / 3
WARM_UP = 60.0  # seconds of a run below which its first quarter is no measure
GROWTH = 1.1  # of the resident memory after the first quarter


@dataclass
class Tally:
    answers: int = 0
    left: int = 0  # by clients that left in the middle
    restored: int = 0  # tokens
    tempted: int = 0  # prompts of which the other key had sent more than the own
    across: int = 0  # tokens restored that the own key had never sent
    faults: list[str] = field(default_factory=list)


class Sent:
    """Everything that clients of one key have sent or been answered, by request."""

    def __init__(self) -> None:
        self._by_request: dict[int, np.ndarray] = {}

    def put(self, request: int, tokens: list[int]) -> None:
        self._by_request[request] = np.asarray(tokens, dtype=np.int32)

    def length(self, tokens: list[int], but: int) -> int:
        """How much of it other requests than `but` have begun with."""
        ours = np.asarray(tokens, dtype=np.int32)
        return max(
            (common_length(ours, other) for request, other in self._by_request.items() if request != but), default=0
        )


class Crowd:
    """What all clients share."""

    def __init__(self, address: tuple[str, int], seconds: float, seed: int) -> None:
        self.address = address
        self.until = time.monotonic() + seconds
        self.tally = Tally()
        self.lock = threading.Lock()
        self._sent = {name: Sent() for name in KEYS}
        self._requests = itertools.count()
        self._seed = seed

    def document(self, rng: random.Random) -> list[int]:
        """One of those that everybody reads at this time; there are new ones every few seconds."""
        draw = random.Random(f"{self._seed} {time.monotonic() // FRESH_SECONDS} {rng.randrange(DOCUMENTS)}")
        return [draw.randrange(1, 250) for _ in range(150 + draw.randrange(300))]

    def sending(self, name: str, prompt: list[int]) -> int:
        """Before it is sent, since a prompt under way may serve another of its key; the request's number."""
        with self.lock:
            request = next(self._requests)
            known = {each: sent.length(prompt, request) for each, sent in self._sent.items()}
            self.tally.tempted += max(known.values()) >= known[name] + 64
            self._sent[name].put(request, prompt)
        return request

    def answered(self, name: str, request: int, prompt: list[int], answer: list[int], restored: int) -> None:
        """What others of the same key sent meanwhile may have served it too; what it sent itself may not."""
        with self.lock:
            self.tally.answers += 1
            self.tally.restored += restored
            self.tally.across += max(0, restored - self._sent[name].length(prompt, request))
            self._sent[name].put(request, [*prompt, *answer])


def talk(crowd: Crowd, name: str, rng: random.Random) -> None:
    while time.monotonic() < crowd.until:
        prompt = crowd.document(rng)
        for _ in range(TURNS):
            prompt += [rng.randrange(1, 250) for _ in range(rng.randrange(5, 40))]
            try:
                answer = ask(crowd, name, prompt, leave=rng.random() < LEAVES)
            except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
                with crowd.lock:
                    crowd.tally.faults.append(f"{name}: {error!r}")
                return
            prompt += answer
            if not answer or len(prompt) > 900:
                break


def ask(crowd: Crowd, name: str, prompt: list[int], leave: bool) -> list[int]:
    """The answer's tokens; none if the client left."""
    request = crowd.sending(name, prompt)
    connection = http.client.HTTPConnection(*crowd.address, timeout=120)
    body = {"prompt": prompt, "max_tokens": 16, "temperature": 0.8, "stream": True, "return_token_ids": True}
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEYS[name]}"}
    connection.request("POST", "/v1/completions", json.dumps({**body, "ignore_eos": True}), headers)
    response = connection.getresponse()
    if response.status != 200:
        raise ValueError(f"{response.status}: {response.read()[:200]!r}")
    answer: list[int] = []
    for line in response:
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        if "error" in event:
            raise ValueError(str(event))
        answer += event["choices"][0].get("token_ids") or [] if event["choices"] else []
        if leave and len(answer) >= 3:
            connection.close()
            with crowd.lock:
                crowd.tally.left += 1
            return []
        if (report := event.get("rekindle")) is not None:
            crowd.answered(name, request, prompt, answer, sum(report["restored"].values()))
    connection.close()
    return answer


def resident(pid: int) -> int:
    """Megabytes."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1]) >> 10


def watch(crowd: Crowd, pid: int, samples: list[tuple[float, int]]) -> None:
    began = time.monotonic()
    while (now := time.monotonic()) < crowd.until:
        samples.append(((now - began) / (crowd.until - began), resident(pid)))
        time.sleep(0.5)


def run(server: OwnServer, clients: int, seconds: float, seed: int) -> tuple[Tally, list[tuple[float, int]]]:
    url = urlsplit(server.url)
    crowd = Crowd((str(url.hostname), int(url.port or 80)), seconds, seed)
    samples: list[tuple[float, int]] = []
    threads = [threading.Thread(target=watch, args=(crowd, server.pid, samples))]
    for number in range(clients):
        rng = random.Random(f"{seed} {number}")
        threads.append(threading.Thread(target=talk, args=(crowd, list(KEYS)[number % 2], rng)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return crowd.tally, samples


def check_rest(server: OwnServer, tally: Tally) -> None:
    """When everybody is gone, so are their slots; and nothing went wrong that only the log knows."""
    for _ in range(600):
        health = json.loads(server.read("/health"))
        if (health["running"], health["waiting"]) == (0, 0):
            break
        time.sleep(0.1)
    else:
        tally.faults.append(f"slots stay taken: {health}")
    server.stop()
    tally.faults += [f"the log: {line.strip()}" for line in server.said if "Traceback" in line]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = given.model or write_synthetic(Path(folder) / "tiny.gguf", "tiny")
        keys = Path(folder) / "keys.toml"
        keys.write_text("".join(f'[{name}]\nkey = "{key}"\n' for name, key in KEYS.items()))
        keys.chmod(0o600)
        options = (*SERVE, "--api-keys", str(keys), "--cache-dir", str(Path(folder) / "cache"))
        server = OwnServer([str(model), *options], key=KEYS["alice"])
        tally, samples = run(server, given.clients, given.seconds, given.seed)
        check_rest(server, tally)
    quarter = [megabytes for share, megabytes in samples if 0.25 <= share < 0.5]
    end = [megabytes for share, megabytes in samples if share >= 0.9]
    memory = {"warm_mb": max(quarter, default=0), "end_mb": max(end, default=0)}
    if given.seconds >= WARM_UP and memory["end_mb"] > GROWTH * memory["warm_mb"]:
        tally.faults.append(f"memory grew: {memory}")
    if tally.across:
        tally.faults.append(f"{tally.across} tokens were restored across keys")
    for fault in tally.faults[:20]:
        print(fault, file=sys.stderr)
    print(json.dumps({**asdict(tally), **memory, "faults": len(tally.faults)}))
    sys.exit(1 if tally.faults else 0)


if __name__ == "__main__":
    main()
