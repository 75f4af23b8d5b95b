"""Routes beside the dialects: text to tokens and back, what this server is, and what it does not do.

`/tokenize` and `/detokenize` answer in the shapes of llama.cpp (content) and vLLM (prompt, messages) at once.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

from pydantic import Field, PrivateAttr, model_validator
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rekindle import __version__
from rekindle.api.dialects.base import Json, Service
from rekindle.api.dialects.openai_chat import ChatBody
from rekindle.api.errors import Unsupported
from rekindle.api.keys import Client
from rekindle.api.params import check_ids
from rekindle.api.parsing import MAX_PROMPT, Body, Count, parse, refuse
from rekindle.api.ports import TextPort
from rekindle.api.served import ServedModel
from rekindle.prompt import Prompt

EMBEDDINGS = ("/v1/embeddings", "/api/embed", "/api/embeddings")


class TokenizeBody(Body):
    model: str | None = None
    content: str | None = None  # llama.cpp's name
    prompt: str | None = None  # vLLM's
    messages: Any = None
    add_special: bool | None = None  # llama.cpp's, false unless given
    add_special_tokens: bool | None = None  # vLLM's, true unless given
    with_pieces: bool | None = None
    return_token_strs: bool | None = None

    _chat: ChatBody | None = PrivateAttr(None)  # the same body, where it has messages

    @classmethod
    def of(cls, data: bytes) -> TokenizeBody:
        body = parse(cls, data)
        if body.messages is not None:
            body._chat = parse(ChatBody, data)
        return body

    def prompt_of(self, text: TextPort, namespace: str) -> Prompt:
        if self._chat is None:
            return text.encode(self.content or self.prompt or "", self.adds_special)
        (prompt,) = self._chat.conversation.render(text, namespace)
        return prompt

    @model_validator(mode="after")
    def _has_one_text(self) -> TokenizeBody:
        if sum(each is not None for each in (self.content, self.prompt, self.messages)) != 1:
            refuse("content", "one of content, prompt and messages is needed")
        return self

    @property
    def adds_special(self) -> bool:
        return bool(self.add_special) if self.content is not None else self.add_special_tokens is not False


class DetokenizeBody(Body):
    model: str | None = None
    tokens: Annotated[list[Count], Field(max_length=MAX_PROMPT, fail_fast=True)]


class Utilities:
    def __init__(self, service: Service) -> None:
        self._service = service

    def routes(self) -> list[Route]:
        return [
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
            Route("/props", self.props),
            *(Route(path, self.embeddings, methods=["POST"]) for path in EMBEDDINGS),
        ]

    async def tokenize(self, request: Request) -> Response:
        client: Client = request.state.client
        job = partial(_tokenized, namespace=client.namespace)
        return JSONResponse(await self._service.work(request, TokenizeBody.of, job))

    async def detokenize(self, request: Request) -> Response:
        text = await self._service.work(request, partial(parse, DetokenizeBody), _detokenized)
        return JSONResponse({"content": text, "prompt": text})

    async def props(self, request: Request) -> Response:
        """Of the model that `?model=` names, or else of the one that answers requests which name none; in llama.cpp's
        words where it has them."""
        models, name = self._service.models, request.query_params.get("model")
        slot = models.exactly(name) if name else models.find(None)
        settings, status = slot.source.settings, models.statuses().get(slot)
        sampling, template = settings.card.sampling, settings.facts.template
        return JSONResponse(
            {
                "default_generation_settings": {
                    "n_ctx": settings.context,
                    "params": {
                        "temperature": sampling.temperature,
                        "top_p": sampling.top_p,
                        "top_k": sampling.top_k,
                        "min_p": sampling.min_p,
                    },
                },
                "total_slots": status.slots if status is not None else 0,  # of a model that is loaded
                "model_alias": settings.models[0],
                "models": models.names,
                "architecture": settings.facts.architecture,
                "chat_template": template,
                "takes_tools": "tools" in template,
                "build_info": f"rekindle {__version__}",
            }
        )

    async def embeddings(self, request: Request) -> Response:
        raise Unsupported("this server generates text and makes no embeddings; point the client to another for them")


def _tokenized(body: TokenizeBody, model: ServedModel, namespace: str) -> Json:
    tokens = list(body.prompt_of(model.text.beyond_context, namespace).tokens)
    asked = body.with_pieces or body.return_token_strs
    pieces = [model.text.token_bytes(token) for token in tokens] if asked else []
    answer: Json = {"tokens": tokens, "count": len(tokens), "max_model_len": model.settings.context}
    if body.with_pieces:
        answer["tokens"] = [{"id": t, "piece": _piece(piece)} for t, piece in zip(tokens, pieces, strict=True)]
    if body.return_token_strs:
        answer["token_strs"] = [piece.decode(errors="replace") for piece in pieces]
    return answer


def _detokenized(body: DetokenizeBody, model: ServedModel) -> str:
    check_ids(body.tokens, "tokens", model.text)
    return b"".join(model.text.token_bytes(token) for token in body.tokens).decode(errors="replace")


def _piece(data: bytes) -> str | list[int]:
    """Text, or bytes where a token is no whole text."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)
