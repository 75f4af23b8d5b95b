"""Structured output and demanded calls over HTTP, from a real engine whose random weights know nothing of JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from starlette.testclient import TestClient
from support.tiny_files import write_tiny_file

from rekindle.api import Guard, ModelHost, ModelText, Settings, create_app
from rekindle.api.request import ClientRequest, Conversation
from rekindle.api.rules import rules_of
from rekindle.build import Built, build_engine
from rekindle.config import Config
from rekindle.errors import BadRequest
from rekindle.grammar import Grammar, compiler
from rekindle.grammar.types import LARGEST
from rekindle.prompt import Prompt
from rekindle.text import ChatTemplate

from .conftest import PaperSource

BLANKS: dict[str, float] = {}  # the bias that keeps a random model from filling its answers with blanks
CHAT, RAW = "/v1/chat/completions", "/v1/completions"
ASK = [{"role": "user", "content": "Go."}]
LOOK = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "minLength": 1, "maxLength": 8},
        "days": {"type": "integer", "minimum": 1, "maximum": 30},
        "unit": {"enum": ["C", "F"]},
        "note": {"type": ["string", "null"], "maxLength": 4},
        "code": {"type": "string", "pattern": "^[a-z]{2}-[0-9]$"},
        "where": {"$ref": "#/$defs/place"},
    },
    "required": ["city", "days", "where"],
    "additionalProperties": False,
    "$defs": {
        "place": {
            "type": "object",
            "properties": {"x": {"type": "boolean"}, "tags": {"type": "array", "items": {"const": "t"}, "maxItems": 2}},
            "required": ["x", "tags"],
            "additionalProperties": False,
        }
    },
}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
STRICT = {"type": "function", "function": {"name": "weather", "strict": True, "parameters": LOOK}}
PLAIN = {"type": "function", "function": {"name": "now", "parameters": NOTHING}}
HERMES = """{%- if tools %}{%- for tool in tools %}{{ tool | tojson }}{%- endfor %}
<tool_call>{"name": <name>, "arguments": <object>}</tool_call>{%- endif %}
{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + (message.content or '') + '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""  # noqa: E501
GLM = HERMES.replace("{%- if tools %}", "{#- <arg_key> -#}{%- if tools %}")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Built]:
    model = write_tiny_file(tmp_path_factory.mktemp("tiny") / "tiny-qwen35-f16.gguf")
    built = build_engine(Config(model=model, threads=1, context=2048, sequences=4, cache_ram=1 << 24, draft="lookup"))
    tokenizer = built.model.tokenizer
    BLANKS.update({str(id): -50.0 for id in range(2000) if tokenizer.token_bytes(id).isspace()})
    yield built
    built.stop()


def client_of(built: Built, source: str | None = None) -> TestClient:
    """source: of another template."""
    model = built.model
    template = model.template if source is None else ChatTemplate(source, model.tokenizer)
    text = ModelText(model.tokenizer, template, context=built.context)
    settings = Settings(models=("m",), context=built.context, fingerprint="f" * 64, created=0)
    host = ModelHost([PaperSource(built.entry, text, settings)]).start()
    return TestClient(create_app(host, Guard()))


@pytest.fixture(scope="module")
def client(built: Built) -> TestClient:
    return client_of(built)


def post(client: TestClient, status: int = 200, route: str = CHAT, **fields: Any) -> Any:
    base = {"max_tokens": 400, "temperature": 1, "seed": 3, "top_p": 1, "min_p": 0}
    source = {"messages": ASK, "enable_thinking": False} if route == CHAT else {"prompt": "Go."}
    fields["logit_bias"] = BLANKS | fields.get("logit_bias", {})
    response = client.post(route, json=base | source | fields)
    assert response.status_code == status, response.text
    return response.json()


def checked_calls(answer: Any) -> list[str]:
    """The names of its calls, each with arguments that are valid."""
    (choice,) = answer["choices"]
    calls = [call["function"] for call in choice["message"].get("tool_calls", ())]
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in (STRICT, PLAIN)}
    for call in calls:
        jsonschema.validate(json.loads(call["arguments"]), schemas[call["name"]])
    if calls and choice["finish_reason"] == "tool_calls":
        assert choice["message"]["content"] is None
    return [call["name"] for call in calls]


# Formats


def schema_format(schema: Any, strict: bool = True) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "strict": strict, "schema": schema}}


@pytest.mark.parametrize("route", [CHAT, RAW])
def test_an_answer_is_valid_by_its_schema(client: TestClient, route: str) -> None:
    answer = post(client, route=route, response_format=schema_format(LOOK))
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "stop"
    jsonschema.validate(json.loads(choice["text"] if route == RAW else choice["message"]["content"]), LOOK)


def test_a_stream_brings_the_same_text(client: TestClient) -> None:
    whole = post(client, response_format=schema_format(LOOK))["choices"][0]["message"]["content"]
    body = {"messages": ASK, "enable_thinking": False, "response_format": schema_format(LOOK), "stream": True}
    fields = {"max_tokens": 400, "temperature": 1, "seed": 3, "top_p": 1, "min_p": 0, "logit_bias": BLANKS}
    lines = [line[6:] for line in client.post(CHAT, json=body | fields).text.splitlines() if line.startswith("data: {")]
    deltas = [choice["delta"] for line in lines for choice in json.loads(line)["choices"]]
    assert "".join(delta.get("content") or "" for delta in deltas) == whole


def test_a_model_that_loves_blanks_writes_one_or_a_line_between_the_parts(client: TestClient) -> None:
    schema = {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 9}, "minItems": 3, "maxItems": 3}
    loved = dict.fromkeys(BLANKS, 20.0)
    text = post(client, response_format=schema_format(schema), logit_bias=loved)["choices"][0]["message"]["content"]
    jsonschema.validate(json.loads(text), schema)
    found = re.findall(r"\s+", text)
    assert found and all(re.fullmatch(r"\n[ \t]*|[ \t]", blanks) for blanks in found)


def test_several_answers_to_one_prompt_each_keep_to_it(client: TestClient) -> None:
    answer = post(client, structured_outputs={"regex": "[a-c]{4}(x|yy)"}, n=3)
    found = [choice["message"]["content"] for choice in answer["choices"]]
    assert all(re.fullmatch("[a-c]{4}(x|yy)", text) for text in found) and len(set(found)) > 1


@pytest.mark.parametrize(
    ("outputs", "matches"),
    [
        ({"choice": ["yes", "no", "äh"]}, "yes|no|äh"),
        ({"grammar": 'root ::= "a" [0-9]+ "b"'}, "a[0-9]+b"),
        (
            {"json": {"type": "array", "items": {"type": "null"}, "minItems": 2, "maxItems": 2}},
            r"\[\s*null\s*,\s*null\s*\]",
        ),
    ],
)
def test_other_grammars(client: TestClient, outputs: dict[str, Any], matches: str) -> None:
    assert re.fullmatch(matches, post(client, structured_outputs=outputs)["choices"][0]["message"]["content"])


def test_json_mode_gives_an_object(client: TestClient) -> None:
    bias = {"92": 100, "61": 0}  # "}" ends it early
    content = post(client, response_format={"type": "json_object"}, logit_bias=bias, temperature=0)["choices"][0]
    assert isinstance(json.loads(content["message"]["content"]), dict)


def test_what_is_wrong_with_an_expression_is_said(client: TestClient) -> None:
    refused = post(client, 400, structured_outputs={"regex": "[0-9"})["error"]["message"]
    assert refused.endswith("regex parse error: unclosed character class")


def test_thinking_comes_first_and_is_free(built: Built, client: TestClient) -> None:
    closing = built.model.tokenizer.id_of("</think>")
    answer = post(
        client, enable_thinking=True, logit_bias={str(closing): 100}, structured_outputs={"regex": "[0-9]{3}"}
    )
    assert re.fullmatch("[0-9]{3}", answer["choices"][0]["message"]["content"])


def test_an_answer_whose_grammar_is_stuck_says_so(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rekindle.grammar.guide.SLOW", 0.0)
    answer = post(client, structured_outputs={"regex": "a{300}"})
    assert answer["choices"][0]["finish_reason"] == "length"
    assert "ms per token" in answer["rekindle"]["grammar"]


# Calls


@pytest.mark.parametrize("source", [None, HERMES], ids=["xml", "hermes"])
@pytest.mark.parametrize("seed", [3, 4])
def test_a_demanded_call_is_made(built: Built, source: str | None, seed: int) -> None:
    client = client_of(built, source)
    fields = {"tools": [STRICT, PLAIN], "seed": seed, "parallel_tool_calls": False}
    for choice, names in (
        ("required", {"weather", "now"}),
        ({"type": "function", "function": {"name": "weather"}}, {"weather"}),
    ):
        answer = post(client, tool_choice=choice, **fields)
        (name,) = checked_calls(answer)
        assert name in names and answer["choices"][0]["finish_reason"] == "tool_calls"


def test_a_call_of_a_strict_tool_is_valid_amid_free_text(built: Built, client: TestClient) -> None:
    """The random model writes any text; it is led to open a call, and the tag that ends it ends the answer."""
    opening = built.model.tokenizer.id_of("<tool_call>")
    answer = post(client, tools=[STRICT], logit_bias={str(opening): 100}, stop=["</tool_call>"])
    assert checked_calls(answer) == ["weather"]
    free = post(client, tools=[STRICT], max_tokens=20)
    assert checked_calls(free) == [] and len(free["choices"][0]["message"]["content"]) > 0


def test_beside_tools_an_answer_is_its_format_or_a_call(built: Built, client: TestClient) -> None:
    fields = {"tools": [STRICT], "response_format": schema_format(LOOK), "parallel_tool_calls": False}
    opening = built.model.tokenizer.id_of("<tool_call>")
    assert checked_calls(post(client, **fields, logit_bias={str(opening): 100})) == ["weather"]
    answer = post(client, **fields, logit_bias={str(opening): -100, "27": -100})
    jsonschema.validate(json.loads(answer["choices"][0]["message"]["content"]), LOOK)


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": "required", "tools": [PLAIN]},
        {"tools": [STRICT]},
        {"tools": [PLAIN], "response_format": schema_format({})},
    ],
    ids=["required", "strict", "format beside tools"],
)
def test_a_format_without_a_grammar_is_refused(built: Built, fields: dict[str, Any]) -> None:
    assert "no grammar yet" in post(client_of(built, GLM), 400, **fields)["error"]["message"]


# Hostile grammars


WIDE = {"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(4000)}}
PANICS = 'start: %json {"e' + chr(0x301) * 300 + '": 5 x}'  # the library cuts its message inside a letter
LARGE = {"enum": ["x" * 1000 + str(number) for number in range(600)]}
HOSTILE = {
    "elsewhere": {"$ref": "http://127.0.0.1/x.json"},
    "elsewhere on disk": {"$ref": "file:///etc/passwd"},
    "a circle": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    "unsatisfiable": {"type": "integer", "minimum": 5, "maximum": 3},
    "nothing": False,
    "a keyword that is not kept": {"type": "object", "dependentRequired": {"a": ["b"]}},
    "too many steps": {"type": "integer", "multipleOf": 987654321},
    "a wrong type": {"type": "text"},
    "a wrong expression": {"type": "string", "pattern": "(?<=a)b"},
}


@pytest.mark.parametrize("schema", HOSTILE.values(), ids=HOSTILE)
def test_a_bad_schema_is_refused_by_name(client: TestClient, schema: Any) -> None:
    error = post(client, 400, response_format=schema_format(schema))["error"]
    assert error["param"] == "response_format.json_schema.schema" and len(error["message"]) < 700


@pytest.mark.parametrize(
    ("route", "field", "value"),
    [
        (CHAT, "response_format", schema_format(LARGE)),
        (CHAT, "structured_outputs", {"grammar": "root ::= a\n" + "x" * LARGEST}),
        ("/v1/responses", "text", {"format": {"type": "json_schema", "name": "x", "schema": LARGE}}),
        ("/v1/messages", "output_config", {"format": {"type": "json_schema", "schema": LARGE}}),
        ("/api/chat", "format", LARGE),
    ],
)
def test_a_large_grammar_is_refused_before_anything_is_made_of_it(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, route: str, field: str, value: Any
) -> None:
    monkeypatch.setattr(Grammar, "__init__", None)  # nobody makes one
    body = {"model": "m", "max_tokens": 9, field: value}
    body["input" if route == "/v1/responses" else "messages"] = ASK
    response = client.post(route, json=body, headers={"anthropic-version": "2023-06-01"})
    assert response.status_code == 400 and f"{field}: the grammar has" in response.text


def test_tools_that_are_large_together_are_refused_before_they_become_a_grammar(
    built: Built, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rekindle.api.rules.calls_only", None)  # nobody calls it
    parameters = {"type": "object", "description": "x" * (LARGEST // 2)}
    tools = [{"type": "function", "function": {"name": f"f{n}", "parameters": parameters}} for n in range(3)]
    text = ModelText(built.model.tokenizer, built.model.template, context=1 << 20)  # that such a prompt fits
    request = ClientRequest(Conversation(ASK, tools, must_call=True), "messages")
    with pytest.raises(BadRequest, match="at most 524,288") as caught:
        rules_of(request, Prompt([1]), text)
    assert caught.value.field == "tools[1].function.parameters"


def test_ebnf_is_read_in_the_process_that_can_be_ended(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "SECONDS", 0.2)
    chain = "root ::= a0\n" + "".join(f"a{n} ::= a{n + 1}\n" for n in range(4000)) + 'a4000 ::= "x"\n'
    error = post(client, 400, structured_outputs={"grammar": chain})["error"]
    assert error["param"] == "structured_outputs.grammar" and "too complex" in error["message"]


@pytest.mark.parametrize(
    "text", ["start: a\na: a", "start: @whole", 'start: "a" b', "start: <|nothing|>", "x ::= y", PANICS]
)
def test_a_bad_grammar_is_refused_by_name(client: TestClient, text: str) -> None:
    error = post(client, 400, structured_outputs={"grammar": text})["error"]
    assert error["param"] == "structured_outputs.grammar"


def test_a_schema_that_takes_too_long_is_refused_and_hurts_nobody(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "SECONDS", 0.2)
    before = post(client, structured_outputs={"regex": "[a-c]{9}"})["choices"][0]["message"]["content"]
    error = post(client, 400, response_format=schema_format(WIDE))["error"]
    assert "too complex" in error["message"]
    assert post(client, structured_outputs={"regex": "[a-c]{9}"})["choices"][0]["message"]["content"] == before


def test_a_keyword_that_is_not_kept_is_left_out_where_the_client_is_not_strict(client: TestClient) -> None:
    schema = {"type": "object", "properties": {}, "additionalProperties": False, "dependentRequired": {"a": ["b"]}}
    answer = post(client, response_format=schema_format(schema, strict=False))
    assert json.loads(answer["choices"][0]["message"]["content"]) == {}
