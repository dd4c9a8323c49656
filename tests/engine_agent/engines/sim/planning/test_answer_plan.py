"""Answers, planned token by token."""

import hashlib
import json
from dataclasses import replace

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_agent.engines.sim.api.chat import parse_chat
from engine_agent.engines.sim.api.completions import parse_completion
from engine_agent.engines.sim.planning.answer_plan import Answer, plan_answers
from engine_agent.engines.sim.planning.generation_request import (
    GenerationRequest,
    OutputForm,
    Prompt,
    Stops,
    Tool,
    ToolChoice,
)
from engine_agent.engines.sim.planning.vocabulary import token_id
from engine_agent.protocol.request_bodies import BadRequest

SEED = 7
STORY = GenerationRequest(model="m", prompts=(Prompt.of_text("tell me a story"),))


def plan(request: GenerationRequest, *, wrong: bool = False) -> tuple[Answer, ...]:
    return plan_answers(request, SEED, 8192, wrong)


@pytest.mark.parametrize(
    ("request_", "tokens", "reason", "digest"),
    [
        (
            parse_chat(
                b'{"model":"m","messages":[{"role":"system","content":"be kind"},'
                b'{"role":"user","content":"tell me a story"}]}'
            ),
            94,
            "stop",
            "35eff167330d82d7",
        ),
        (
            parse_completion(b'{"model":"m","prompt":"tell me a story","max_tokens":9,"seed":5}'),
            9,
            "length",
            "a5cc30f6df737719",
        ),
        (parse_completion(b'{"model":"m","prompt":[5,6,7],"max_tokens":9}'), 9, "length", "1fb96f0cb705b9c8"),
        (replace(STORY, output_limit=300, exact_length=True), 300, "length", "a220009ebb89947a"),
    ],
)
def test_plain_answers_are_those_of_all_versions(
    request_: GenerationRequest, tokens: int, reason: str, digest: str
) -> None:
    (answer,) = plan(request_)

    assert (len(answer.tokens), answer.finish_reason) == (tokens, reason)
    assert hashlib.sha256(answer.text.encode()).hexdigest()[:16] == digest


def test_answers_to_one_prompt_differ_and_the_first_is_that_which_comes_alone() -> None:
    several = plan(replace(STORY, choices=3, prompts=(*STORY.prompts, Prompt.of_text("and another"))))

    assert len({answer.text for answer in several}) == 6
    assert several[0] == plan(STORY)[0]


def test_a_limit_or_the_context_ends_an_answer() -> None:
    (limited,) = plan(replace(STORY, output_limit=3))

    assert (limited.text, limited.finish_reason) == ("From sure take", "length")
    with pytest.raises(BadRequest, match="maximum context length is 5") as refused:
        plan_answers(replace(STORY, output_limit=2), SEED, 5, wrong=False)
    assert refused.value.code == "context_length_exceeded"
    with pytest.raises(BadRequest) as refused:
        plan_answers(STORY, SEED, 4, wrong=False)
    assert refused.value.code == "context_length_exceeded"
    with pytest.raises(BadRequest) as refused:
        plan_answers(replace(STORY, output_limit=6), SEED, 5, wrong=False)
    assert refused.value.param == "max_tokens"


def test_no_request_has_the_process_plan_for_long() -> None:
    with pytest.raises(BadRequest, match="262144") as refused:
        plan(replace(STORY, choices=128, output_limit=8000, exact_length=True))

    assert refused.value.param == "n"
    assert len(plan(replace(STORY, choices=128, output_limit=8000))) == 128


def test_a_longer_answer_begins_as_the_natural_one() -> None:
    (natural,), (longer,) = plan(STORY), plan(replace(STORY, min_tokens=500))

    assert len(longer.tokens) == 500
    assert longer.text.startswith(natural.text)


@pytest.mark.parametrize(
    ("stops", "text", "tokens", "reason"),
    [
        (Stops(("clear",)), "From sure take such ", 5, "clear"),
        (Stops(("clear",), is_included=True), "From sure take such clear", 5, "clear"),
        (Stops(("ke such cl",)), "From sure ta", 5, "ke such cl"),
        (Stops(("very", "such")), "From sure take ", 4, "such"),
        (Stops((), frozenset({token_id(" such")})), "From sure take", 4, token_id(" such")),
        (Stops(("never said",)), None, 94, None),
    ],
)
def test_a_stop_cuts_the_text_and_its_tokens_are_computed(
    stops: Stops, text: str | None, tokens: int, reason: str | int | None
) -> None:
    (natural,), (answer,) = plan(STORY), plan(replace(STORY, stops=stops))

    assert answer.text == (natural.text if text is None else text)
    assert (len(answer.tokens), answer.stop_reason, answer.finish_reason) == (tokens, reason, "stop")
    assert [token.text for token in answer.tokens] == [token.text for token in natural.tokens[:tokens]]


def test_a_stop_counts_only_after_the_least_tokens() -> None:
    (answer,) = plan(replace(STORY, stops=Stops(("e",)), min_tokens=10))

    assert len(answer.tokens) == 15
    (natural,) = plan(STORY)
    assert natural.text.startswith(answer.text)


@given(st.text("aeorst v", min_size=1, max_size=4), st.integers(0, 30))
def test_no_stop_text_is_in_what_the_client_gets(stop: str, least: int) -> None:
    (natural,), (answer,) = plan(STORY), plan(replace(STORY, stops=Stops((stop,)), min_tokens=least))

    before = "".join(token.text for token in natural.tokens[:least])
    assert natural.text.startswith(answer.text)
    assert stop not in answer.text[max(0, len(before) - len(stop) + 1) :]
    assert (answer.text == natural.text) == (answer.stop_reason is None)


SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 1}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER = Tool("get_weather", "Says how warm it is in a city.", SCHEMA)
CLOCK = Tool("getLocalTime", "", None)


def asked(text: str, kind: str = "auto", name: str = "", *, parallel: bool = True, **more: bool) -> GenerationRequest:
    choice = ToolChoice(kind, name, parallel)  # type: ignore[arg-type]
    prompt = Prompt((text,), text, **more)  # type: ignore[arg-type]
    return GenerationRequest(model="m", prompts=(prompt,), tools=(CLOCK, WEATHER), tool_choice=choice)


@pytest.mark.parametrize(
    ("request_", "called", "reason"),
    [
        (asked("how warm is this city"), ["get_weather"], "tool_calls"),
        (asked("the TIME and the weather, please"), ["getLocalTime", "get_weather"], "tool_calls"),
        (asked("the warm city, its weather and time", parallel=False), ["get_weather"], "tool_calls"),
        (asked("hello"), [], "stop"),
        (asked("how warm is this city", "none"), [], "stop"),
        (asked("how warm is this city", follows_tool=True), [], "stop"),
        (asked("hello", "required"), ["getLocalTime"], "tool_calls"),
        (asked("hello", "required", follows_tool=True), ["getLocalTime"], "tool_calls"),
        (asked("the time", "named", "get_weather"), ["get_weather"], "stop"),
    ],
)
def test_tools_are_called_for_what_they_do(request_: GenerationRequest, called: list[str], reason: str) -> None:
    (answer,) = plan(request_)

    assert [name for name, _ in answer.called] == called
    assert answer.finish_reason == reason
    assert bool(answer.text) == (not called)
    for name, arguments in answer.called:
        jsonschema.validate(json.loads(arguments), SCHEMA if name == "get_weather" else {"type": "object"})


def test_a_limit_may_end_an_answer_within_a_call() -> None:
    (answer,) = plan(replace(asked("the time and the weather"), output_limit=1))

    assert (answer.called, answer.finish_reason) == ((("getLocalTime", ""),), "length")


def test_a_text_has_the_form_that_was_asked_for() -> None:
    (document,) = plan(replace(STORY, form=OutputForm("json", SCHEMA, "response_format")))
    (choice,) = plan(replace(STORY, form=OutputForm("choice", ["red", "green or so"], "structured_outputs")))
    (text,) = plan(replace(STORY, form=OutputForm("regex", "a{3}b", "structured_outputs")))
    (empty,) = plan(replace(STORY, form=OutputForm("choice", [""], "structured_outputs")))

    jsonschema.validate(json.loads(document.text), SCHEMA)
    assert choice.text in {"red", "green or so"}
    assert text.text == "aaab"
    assert (empty.text, len(empty.tokens)) == ("", 1)
    assert plan(replace(STORY, form=OutputForm("json", SCHEMA, "response_format"))) == (document,)


def test_damaged_weights_keep_the_form_and_say_something_else() -> None:
    formed = replace(STORY, form=OutputForm("json", SCHEMA, "response_format"))

    (right,), (wrong,) = plan(formed), plan(formed, wrong=True)

    assert right.text != wrong.text
    jsonschema.validate(json.loads(wrong.text), SCHEMA)
    assert plan(STORY, wrong=True)[0].text.startswith("morF~ erus~")


@pytest.mark.parametrize(
    ("request_", "param", "word"),
    [
        (replace(STORY, form=OutputForm("json", {"contains": 1}, "text.format")), "text.format", "contains"),
        (
            replace(STORY, form=OutputForm("regex", "(?=a)", "structured_outputs")),
            "structured_outputs",
            "not supported",
        ),
        (replace(asked("x", "named", "bad"), tools=(Tool("bad", "", {"contains": 1}),)), "tools", "`bad`.*contains"),
        (replace(asked("x", "named", "bad"), tools=(Tool("bad", "", {"type": "array"}),)), "tools", "not an object"),
    ],
)
def test_what_cannot_be_said_is_refused_by_the_field_that_asks_for_it(
    request_: GenerationRequest, param: str, word: str
) -> None:
    with pytest.raises(BadRequest, match=word) as refused:
        plan(request_)

    assert refused.value.param == param
