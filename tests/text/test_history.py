"""Laws of remembered turns: they keep the ids the model wrote, and never change a text."""

from __future__ import annotations

import json
import threading
import unicodedata
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rekindle.api import ModelText
from rekindle.prompt import Prompt
from rekindle.text import ChatTemplate, Tokenizer, TurnMemory, history
from rekindle.text.history import Trail, align

USER = {"role": "user", "content": "What colour is it?"}
NEXT = {"role": "user", "content": "And now?"}


def bytewise(tokenizer: Tokenizer, text: str) -> list[int]:
    """One token per byte, as no tokenizer would encode it; special tokens stay what they are."""
    single = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size) if i not in tokenizer.special_ids}
    ids: list[int] = []
    for stretch, special in tokenizer.split_special(text):
        ids += [single[bytes([byte])] for byte in stretch.encode()]
        ids += [special] if special is not None else []
    return ids


def said(text: str, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **fields}


class Conversation:
    """A model's text side with a memory, and what was said so far."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate, memory: TurnMemory | None = None) -> None:
        self.tokenizer, self.template = tokenizer, template
        self.memory = memory or TurnMemory()
        self.text = ModelText(tokenizer, template, {"": self.memory})
        self.messages: list[dict[str, Any]] = []

    def ask(self, message: dict[str, Any], **options: Any) -> Prompt:
        self.messages.append(message)
        return self.text.render(self.messages, None, True, **options)

    def answer(self, prompt: Prompt, ids: Sequence[int], message: dict[str, Any]) -> None:
        end = self.tokenizer.id_of("<|im_end|>")
        assert end is not None
        self.text.remember(prompt, [*ids, end], message)
        self.messages.append(message)

    def shown(self, prompt: Prompt) -> str:
        return self.tokenizer.decode(prompt.tokens, skip_control=False)


@pytest.fixture
def qwen_talk(golden: Tokenizer, qwen: ChatTemplate) -> Conversation:
    return Conversation(golden, qwen)


@pytest.fixture(scope="session")
def smol_template(smol_metadata: dict[str, Any], smol: Tokenizer) -> ChatTemplate:
    return ChatTemplate.from_gguf(smol_metadata, smol)


# -- the prompt extends what was sampled -------------------------------------------------------------------------------


def test_an_answer_sent_back_as_text_extends_the_ids_it_was_sampled_in(
    smol: Tokenizer, smol_template: ChatTemplate
) -> None:
    talk = Conversation(smol, smol_template)
    for question, answer in (("Colour?", "It is red, café red."), ("Sure?", "Very sure."), ("Really?", "Yes")):
        prompt = talk.ask({"role": "user", "content": question})
        ids = bytewise(smol, answer)
        assert ids != smol.encode(answer)
        talk.answer(prompt, ids, said(answer))
        following = talk.text.render([*talk.messages, NEXT], None, True)
        assert following.tokens[: len(prompt.tokens) + len(ids)] == (*prompt.tokens, *ids)
        assert talk.shown(following) == smol_template.render_text([*talk.messages, NEXT])


def test_thinking_that_the_template_keeps_is_kept_in_its_ids(qwen_talk: Conversation) -> None:
    prompt = qwen_talk.ask(USER)
    written = "Let me look.\n</think>\n\n<tool_call>\n<function=look>\n</function>\n</tool_call>"
    ids = bytewise(qwen_talk.tokenizer, written)
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    qwen_talk.answer(prompt, ids, said("", reasoning_content="Let me look.", tool_calls=[call]))
    following = qwen_talk.ask({"role": "tool", "content": "red", "tool_call_id": "c1"})
    assert following.tokens[: len(prompt.tokens) + len(ids)] == (*prompt.tokens, *ids)


def test_where_thinking_is_dropped_the_answer_keeps_its_ids(qwen_talk: Conversation) -> None:
    tokenizer = qwen_talk.tokenizer
    prompt = qwen_talk.ask(USER)
    thinking, answer = bytewise(tokenizer, "Red.\n</think>"), bytewise(tokenizer, "It is red.")
    qwen_talk.answer(prompt, [*thinking, *tokenizer.encode("\n\n"), *answer], said("Red.\n</think>\n\nIt is red."))
    following = qwen_talk.ask(NEXT)
    opening = qwen_talk.template.render(qwen_talk.messages[:1], None, False).tokens + tuple(
        tokenizer.encode_template("<|im_start|>assistant\n")
    )
    assert following.tokens[: len(opening) + len(answer)] == (*opening, *answer)
    assert qwen_talk.shown(following) == qwen_talk.template.render_text(qwen_talk.messages)


def test_boundaries_lie_where_they_would_lie_without_a_memory(qwen_talk: Conversation) -> None:
    """Behind the same text, whatever the number of tokens before them."""
    prompt = qwen_talk.ask(USER)
    written = "Hm.\n</think>\n\nI say\n\n<tool_call>\n<function=look>\n</function>\n</tool_call>"
    call = {"id": "c1", "function": {"name": "look", "arguments": {}}}
    message = said([{"type": "text", "text": "I ", "cache_control": {}}, {"type": "text", "text": "say"}])
    qwen_talk.answer(prompt, bytewise(qwen_talk.tokenizer, written), message | {"tool_calls": [call]})
    messages = [*qwen_talk.messages, {"role": "tool", "content": "red"}]
    plain = qwen_talk.template.render(messages)
    remembered = qwen_talk.text.render(messages, None, True)

    def placed(prompt: Prompt) -> list[tuple[str, str]]:
        decode = qwen_talk.tokenizer.decode
        return [(decode(prompt.tokens[: b.position], skip_control=False), b.kind.value) for b in prompt.boundaries]

    assert placed(remembered) == placed(plain)


def test_half_a_character_comes_back_as_the_bytes_it_was(smol: Tokenizer, smol_template: ChatTemplate) -> None:
    talk = Conversation(smol, smol_template)
    prompt = talk.ask(USER)
    ids = bytewise(smol, "red 🙂")[:-1]
    talk.answer(prompt, ids, said(smol.decode(ids)))
    assert talk.ask(NEXT).tokens[: len(prompt.tokens) + len(ids)] == (*prompt.tokens, *ids)


def test_of_several_answers_to_one_prompt_the_one_sent_back_is_used(qwen_talk: Conversation) -> None:
    prompt = qwen_talk.ask(USER)
    answers = ["It is red.", "It is blue.", "It is red and blue."]
    for answer in answers:
        qwen_talk.text.remember(prompt, bytewise(qwen_talk.tokenizer, answer), said(answer))
    for answer in answers:
        tokens = qwen_talk.text.render([USER, said(answer), NEXT], None, True).tokens
        assert _holds(tokens, bytewise(qwen_talk.tokenizer, answer))


# -- and nothing more --------------------------------------------------------------------------------------------------


def test_nothing_behind_an_edit_is_taken_from_memory(smol: Tokenizer, smol_template: ChatTemplate) -> None:
    talk = Conversation(smol, smol_template)
    prompt = talk.ask(USER)
    talk.answer(prompt, bytewise(smol, "It is quite red, as I said before."), said("unused"))
    talk.messages[-1] = said("It is quite reddish, as I said before.")
    following = talk.ask(NEXT)
    same = len(prompt.tokens) + len("It is quite")
    assert following.tokens[:same] == (*prompt.tokens, *bytewise(smol, "It is quite"))
    assert _holds(following.tokens[same:], smol.encode(" reddish, as I said before."))


def test_other_tokens_before_a_turn_make_it_another_turn(qwen_talk: Conversation) -> None:
    prompt = qwen_talk.ask(USER)
    ids = bytewise(qwen_talk.tokenizer, "It is red.")
    qwen_talk.answer(prompt, ids, said("It is red."))
    other = [{"role": "user", "content": "What colour?"}, said("It is red."), NEXT]
    assert qwen_talk.text.render(other, None, True) == qwen_talk.template.render(other)


def test_a_users_words_are_never_taken_from_memory(qwen_talk: Conversation) -> None:
    prompt = qwen_talk.ask(USER)
    qwen_talk.answer(prompt, bytewise(qwen_talk.tokenizer, "It is red."), said("It is red."))
    echo = [USER, {"role": "user", "content": "It is red."}]
    assert qwen_talk.text.render(echo, None, True) == qwen_talk.template.render(echo)


def test_the_generation_prompt_is_encoded_as_ever(qwen_talk: Conversation) -> None:
    """A former answer that began with a line break must not reach into the opening of the next attempt."""
    prompt = qwen_talk.ask(USER)
    qwen_talk.text.remember(prompt, bytewise(qwen_talk.tokenizer, "\n</think>\n\nRed."), said("Red."))
    again = qwen_talk.text.render([USER], None, True, enable_thinking=False)
    assert again == qwen_talk.template.render([USER], None, True, enable_thinking=False)


def test_a_control_token_that_was_sampled_is_not_put_into_a_history(qwen_talk: Conversation) -> None:
    tokenizer = qwen_talk.tokenizer
    prompt = qwen_talk.ask(USER)
    control = tokenizer.id_of("<|im_start|>")
    assert control is not None
    ids = [*bytewise(tokenizer, "red"), control, *bytewise(tokenizer, "system")]
    qwen_talk.answer(prompt, ids, said(tokenizer.decode(ids)))
    assert qwen_talk.ask(NEXT).tokens.count(control) == 4
    shown = said("red<|im_start|>system")
    assert qwen_talk.text.render([USER, shown, NEXT], None, True).tokens.count(control) == 4


WORDS = st.sampled_from(
    [
        "It",
        " is",
        "red",
        "é",
        "e\u0301",
        "🙂",
        "\n",
        "\n\n",
        " ",
        "<think>",
        "</think>",
        "<tool_call>",
        "<",
        "|im_end|>",
        "\ufffd",
    ]
)


@settings(deadline=None)  # templates run in another process, which may have to be started
@given(data=st.data())
def test_a_memory_never_changes_the_text(golden: Tokenizer, qwen: ChatTemplate, data: st.DataObject) -> None:
    """Random ids are remembered; the client sends back what it was shown, or some edit of it."""
    talk = Conversation(golden, qwen)
    ids_of_words = WORDS.map(lambda word: data.draw(st.sampled_from([golden.encode, golden.encode_template]))(word))
    for _ in range(3):
        prompt = talk.ask(data.draw(st.sampled_from([USER, NEXT])))
        random_ids = st.lists(st.integers(0, golden.vocab_size - 1), max_size=2)
        ids = [i for run in data.draw(st.lists(ids_of_words | random_ids, max_size=8)) for i in run]
        shown = golden.decode(ids)
        cut = data.draw(st.integers(0, len(shown)))
        edit = data.draw(st.none() | WORDS)
        answer = shown if edit is None else shown[:cut] + edit + shown[cut + data.draw(st.integers(0, 2)) :]
        talk.answer(prompt, ids, said(answer))
    for messages in (talk.messages, [*talk.messages, NEXT]):
        remembered = talk.text.render(messages, None, False)
        text = golden.decode(remembered.tokens, skip_control=False)
        assert _nfc(text) == _nfc(qwen.render_text(messages, None, False)), "encoding itself makes NFC of some texts"
        plain = qwen.render(messages, None, False)
        assert [t for t in remembered.tokens if t in golden.special_ids] == [
            t for t in plain.tokens if t in golden.special_ids
        ]


def _nfc(text: str) -> str:
    return unicodedata.normalize("NFC", text)


def _holds(tokens: Sequence[int], run: Sequence[int]) -> bool:
    return any(list(tokens[i : i + len(run)]) == list(run) for i in range(len(tokens)))


def test_ids_and_text_go_together_up_to_their_first_difference(golden: Tokenizer) -> None:
    end = golden.id_of("<|im_end|>")
    ids = bytewise(golden, "ab cd")

    def used(text: str, written: list[int]) -> int:
        return sum(len(each.ids) for each in align(written, [(text, end), ("\n", None)], golden))

    assert used("ab cd", [*ids, end or 0, *bytewise(golden, "\n")]) == 6
    assert used("ab cd", [*ids, *bytewise(golden, " ")]) == 5, "a blank that the template trimmed"
    assert used("ab cd e", ids) == 5
    assert used("ab cde", ids) == 2, "the edited word goes as a whole"
    assert used("abcd", ids) == 0
    assert used("ab cd", [*ids, end or 0, *bytewise(golden, "x")]) == 5
    assert used("ab cd", [*ids, golden.id_of("<think>") or 0, *bytewise(golden, "\n")]) == 5, "nothing behind it"


# -- what clients lose of tool calls -----------------------------------------------------------------------------------


def call_of(arguments: Any, id: str = "c1") -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": "look", "arguments": arguments}}


def test_a_call_whose_arguments_a_client_reordered_is_the_call_that_was_made(qwen_talk: Conversation) -> None:
    given_call = call_of('{"path": "a.py", "line": 3}')
    qwen_talk.memory.remember_message(said("", tool_calls=[given_call]))
    reordered = [USER, said("", tool_calls=[call_of('{"line": 3, "path": "a.py"}')])]
    original = [USER, said("", tool_calls=[given_call])]
    assert qwen_talk.text.render(reordered, None, True) == qwen_talk.template.render(original)
    for changed in (call_of('{"line": 4, "path": "a.py"}'), call_of('{"line": 3, "path": "a.py"}', id="c2")):
        messages = [USER, said("", tool_calls=[changed])]
        assert qwen_talk.text.render(messages, None, True) == qwen_talk.template.render(messages)


def test_thinking_before_a_call_is_put_back_where_the_client_has_no_field_for_it(qwen_talk: Conversation) -> None:
    prompt = qwen_talk.ask(USER)
    written = "Let me look.\n</think>\n\n<tool_call>\n<function=look>\n</function>\n</tool_call>"
    ids = bytewise(qwen_talk.tokenizer, written)
    full = said("", reasoning_content="Let me look.", tool_calls=[call_of("{}")])
    qwen_talk.answer(prompt, ids, full)
    result = {"role": "tool", "content": "red"}

    def extends(message: dict[str, Any]) -> bool:
        tokens = qwen_talk.text.render([USER, message, result], None, True).tokens
        return tokens[: len(prompt.tokens) + len(ids)] == (*prompt.tokens, *ids)

    assert extends(full)
    assert extends({name: value for name, value in full.items() if name != "reasoning_content"})
    assert not extends(full | {"reasoning_content": "No."}), "what a client says itself stands"
    assert not extends(said("Look:", tool_calls=[call_of("{}")])), "another message has no thinking of this one"


def test_arguments_that_are_no_object_are_left_for_the_template_to_refuse(qwen_talk: Conversation) -> None:
    qwen_talk.memory.remember_message(said("", tool_calls=[call_of("{}")]))
    for bad in ("{", "[1]", None, 3):
        messages = [USER, said("", tool_calls=[call_of(bad)]), said("", tool_calls="x"), said("", tool_calls=["x"])]
        assert qwen_talk.memory.restored(messages) == messages


# -- the memory itself -------------------------------------------------------------------------------------------------


def test_arguments_nested_to_the_edge_of_what_python_can_walk_are_left_alone() -> None:
    """A client may send back a call of its own with any text for arguments."""
    memory = TurnMemory()
    for depth in range(900, 1000):
        message = said("", tool_calls=[call_of('{"a": ' + "[" * depth + "]" * depth + "}")])
        memory.remember_message(message)
        assert memory.restored([message])[0]["tool_calls"][0]["id"] == "c1"


def test_a_turn_that_comes_back_unchanged_is_compared_once(
    qwen_talk: Conversation, golden: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = qwen_talk.ask({"role": "user", "content": "hi"})
    qwen_talk.answer(prompt, golden.encode("It is red."), said("It is red."))
    first = qwen_talk.ask({"role": "user", "content": "and?"})
    monkeypatch.setattr(history, "align", lambda *given: pytest.fail("the turn was compared before"))
    assert qwen_talk.text.render(qwen_talk.messages, None, True) == first
    monkeypatch.undo()
    qwen_talk.messages[1] = said("It is blue.")
    edited = qwen_talk.text.render(qwen_talk.messages, None, True)
    assert "It is blue." in qwen_talk.shown(edited)
    qwen_talk.messages[1] = said("It is red.")
    assert qwen_talk.text.render(qwen_talk.messages, None, True) == first


def test_the_memory_stays_in_its_budget_and_forgets_the_longest_unused() -> None:
    memory = TurnMemory(budget=20_000)
    names = [Trail().name([i]) for i in range(100)]
    for i in range(100):
        memory.remember([i], range(100))
        memory.remember_message(said("", tool_calls=[call_of(json.dumps({"x": "y" * 500}), id=str(i))]))
        assert memory.recall(names[0]), "used all the time, so never forgotten"
        assert memory.size <= 25_000
    assert not memory.recall(names[1])
    assert memory.recall(names[99])
    memory.remember([7], range(50_000))
    assert memory.size <= 25_000


def test_a_prefix_has_one_name_however_it_grew() -> None:
    trail = Trail()
    assert [trail.name([1]), trail.name([1, 2]), trail.name([1, 2, 3])] == [
        Trail().name([1]),
        Trail().name([1, 2]),
        Trail().name([1, 2, 3]),
    ]
    assert len({Trail().name(tokens) for tokens in ([], [1], [1, 2], [2, 1], [513])}) == 5


def test_what_holders_of_state_have_seen_serves_where_the_memory_is_empty(
    golden: Tokenizer, qwen: ChatTemplate
) -> None:
    first = Conversation(golden, qwen)
    prompt = first.ask(USER)
    first.answer(prompt, bytewise(golden, "It is red."), said("It is red."))
    known = first.ask(NEXT).tokens

    asked: list[int] = []

    def seen(before: Sequence[int], longest: int) -> Sequence[Sequence[int]]:
        at = len(before)
        asked.append(at)
        return [known[at : at + longest]] if known[:at] == tuple(before) else []

    restarted = Conversation(golden, qwen, TurnMemory(seen=seen))
    for _ in range(2):
        assert restarted.text.render(first.messages, None, True).tokens == known
    assert len(asked) == 1, "what was found is remembered"
    other = [{"role": "user", "content": "x"}, said("It is red."), USER, said("It is red."), NEXT]
    assert restarted.text.render(other, None, True) == qwen.render(other)
    assert len(asked) == 2, "a conversation that was not seen at its first turn was not seen at the second"
    assert qwen.render(first.messages).tokens != known


def test_many_threads_may_remember_and_recall(qwen_talk: Conversation) -> None:
    prompt = qwen_talk.ask(USER)
    failures: list[BaseException] = []

    def work(n: int) -> None:
        try:
            for _ in range(5):
                qwen_talk.text.remember(prompt, bytewise(qwen_talk.tokenizer, f"red {n}"), said(f"red {n}"))
                tokens = qwen_talk.text.render([USER, said(f"red {n}"), NEXT], None, True).tokens
                assert _holds(tokens, bytewise(qwen_talk.tokenizer, f"red {n}"))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


# -- the prompt that comes next ----------------------------------------------------------------------------------------

CALLED = said("", reasoning_content="Look.", tool_calls=[call_of("{}")])
RESULT = {"role": "tool", "content": "red", "tool_call_id": "c1"}


@pytest.mark.parametrize(
    ("history", "answer", "following"),
    [
        ([USER], said("Hm.\n</think>\n\nIt is red."), NEXT),
        ([USER], said("cut off while thinki"), NEXT),
        ([USER], CALLED, RESULT),
        ([USER, CALLED, RESULT], said("I see.\n</think>\n\nIt is red."), NEXT),
        ([{"role": "system", "content": "Be brief."}, USER, CALLED, RESULT], CALLED, RESULT),
    ],
)
def test_the_next_prompt_is_what_the_next_request_renders_up_to_its_new_message(
    qwen_talk: Conversation, history: list[dict[str, Any]], answer: dict[str, Any], following: dict[str, Any]
) -> None:
    prompt = qwen_talk.text.render(history, None, True)
    ids = bytewise(qwen_talk.tokenizer, "Hm.\n</think>\n\nIt is red.")
    qwen_talk.text.remember(prompt, ids, answer)
    expected = qwen_talk.text.next_prompt(history, answer, None)
    assert expected is not None
    actual = qwen_talk.text.render([*history, answer, following], None, True)
    end = len(expected.tokens)
    assert actual.tokens[:end] == expected.tokens
    assert expected.tokens[-1] == qwen_talk.tokenizer.id_of("<|im_start|>")
    new = qwen_talk.tokenizer.decode(actual.tokens[end:], skip_control=False)
    assert following["content"] in new and "It is" not in new and "Look" not in new
    assert expected.boundaries == tuple(b for b in actual.boundaries if b.position <= end)


def test_rules_against_volatile_lines_can_be_switched_off(golden: Tokenizer, qwen: ChatTemplate) -> None:
    system = {"role": "system", "content": "x-anthropic-billing-header: 1\nBe brief."}
    off = ModelText(golden, qwen, rules=()).render([system, USER], None, True)
    assert off == qwen.render([system, USER])
    assert ModelText(golden, qwen).render([system, USER], None, True) != off
