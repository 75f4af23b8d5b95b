"""A dialect is one file: this one is written here, and the server speaks it beside its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import httpx
from pydantic import Field
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rekindle.api import ApiKeys, Settings
from rekindle.api.dialects import DIALECTS
from rekindle.api.dialects.base import Service
from rekindle.api.errors import Fault
from rekindle.api.generation import Generation
from rekindle.api.parsing import Body, parse
from rekindle.api.request import ClientRequest, Conversation


class LetterBody(Body):
    model: str | None = None
    dear: str
    words: int = Field(50, ge=1, le=1000)
    aloud: bool = False


class LetterWriter:
    def __init__(self, generation: Generation) -> None:
        self._generation = generation

    async def whole(self) -> dict[str, Any]:
        (answer,) = await self._generation.answers()
        return {"letter": answer.text, "restored": self._generation.usage().cached}

    async def events(self) -> AsyncIterator[bytes]:
        async for deltas in self._generation.batches(patience=1.0):
            for delta in deltas:
                yield delta.text.encode()


class Letters:
    path = "/post/letter"
    base_path = "/post"
    media_type = "text/plain"

    def check(self, headers: Headers) -> None:
        """No header matters."""

    def parse(self, data: bytes) -> LetterBody:
        return parse(LetterBody, data)

    def request(self, body: LetterBody) -> ClientRequest:
        source = Conversation([{"role": "user", "content": body.dear}])
        return ClientRequest(source, "dear", max_tokens=body.words, stream=body.aloud)

    def writer(self, body: LetterBody, generation: Generation, settings: Settings) -> LetterWriter:
        return LetterWriter(generation)

    def error_status(self, fault: Fault) -> int:
        return fault.status

    def error_body(self, fault: Fault) -> dict[str, Any]:
        return {"returned": fault.message}

    def routes(self, service: Service) -> list[Route]:
        async def writers(request: Request) -> Response:
            return JSONResponse(list(service.models.names))

        async def weigh(request: Request) -> Response:
            return JSONResponse(
                await service.work(
                    request, self.parse, lambda body, model: len(model.text.encode(body.dear, True).tokens)
                )
            )

        return [Route("/post/writers", writers), Route("/scales", weigh, methods=["POST"])]


def test_a_dialect_of_one_file_answers_streams_refuses_and_lists_its_models(fresh_house):
    house = fresh_house(dialects=(*DIALECTS, Letters()))

    def post(**body: Any) -> httpx.Response:
        return httpx.post(house.url + "/post/letter", json=body)

    assert post(dear="say(hello)").json()["letter"] == "hello"
    assert post(dear="say(hello)", aloud=True).text == "hello"
    assert house.engine.requests[0].max_tokens == 50
    assert house.text.remembered[0][2] == {"role": "assistant", "content": "hello"}, "turns are remembered for it too"
    refused = post(dear="x", words=0)
    assert refused.status_code == 400
    assert refused.json() == {"returned": "words: Input should be greater than or equal to 1"}
    assert post(dear="[full]").json() == {"returned": "7 requests are waiting, the queue holds 7"}
    assert httpx.get(house.url + "/post/letter").json().keys() == {"returned"}
    assert httpx.get(house.url + "/post/writers").json() == ["paper-9b", "org/alias"]
    assert httpx.post(house.url + "/scales", json={"dear": "four"}).json() == 4
    assert httpx.post(house.url + "/post/nowhere", json={}).json().keys() == {"returned"}
    assert house.client().models.list().data[0].id == "paper-9b", "the others stay as they are"


def test_the_paths_of_a_new_dialect_need_a_key_where_there_are_keys(fresh_house):
    house = fresh_house(dialects=(*DIALECTS, Letters()), keys=ApiKeys.single("sesame-seed"))
    assert httpx.post(house.url + "/post/letter", json={"dear": "x"}).status_code == 401
    assert httpx.get(house.url + "/post/writers").status_code == 401
    assert httpx.post(house.url + "/scales", json={"dear": "x"}).status_code == 401
    right = {"x-api-key": "sesame-seed"}
    assert httpx.get(house.url + "/post/writers", headers=right).status_code == 200


def test_the_http_side_loads_no_torch():
    """Not even through what it imports of other packages."""
    code = "import sys, rekindle.api; assert not {'torch', 'triton'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_dialect_of_a_conversation_tells_the_token_ids_that_it_is_asked_for(house):
    said = {"messages": [{"role": "user", "content": "say(hi)"}], "max_tokens": 9}
    bodies = {"/v1/messages": said, "/v1/responses": {"input": "say(hi)", "max_output_tokens": 9}}
    chat = httpx.post(house.url + "/v1/chat/completions", json=said | {"return_token_ids": True}).json()
    expected = [chat["choices"][0][name] for name in ("prompt_token_ids", "token_ids")]
    for path, body in bodies.items():
        plain = httpx.post(house.url + path, json=body).json()["rekindle"]
        assert "token_ids" not in plain
        told = httpx.post(house.url + path, json=body | {"return_token_ids": True}).json()["rekindle"]
        assert [told["prompt_token_ids"], told["token_ids"]] == expected
        assert not told["ignored_fields"]
        stream = httpx.post(house.url + path, json=body | {"return_token_ids": True, "stream": True}).text
        assert '"prompt_token_ids":' in stream
