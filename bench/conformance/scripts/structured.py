"""Libraries whose point is output of a given form. One function for each."""

from typing import Any

import openai
from cases import BASE_URL, KEY, MESSAGES, MODEL, QUESTION, WEATHER_QUESTION, expect, features, variant
from shapes import Capital, Weather, weather


def client(key: str = KEY) -> openai.OpenAI:
    return openai.OpenAI(base_url=BASE_URL, api_key=key, max_retries=0, timeout=120)


def guidance() -> None:
    import guidance

    def ask(model: str = MODEL, key: str = KEY, grammar: Any = None) -> str:
        begun = guidance.models.OpenAI(model, api_key=key, base_url=BASE_URL, max_retries=0, echo=False)
        with guidance.user():
            begun += QUESTION
        with guidance.assistant():
            begun += grammar or guidance.gen(name="said", max_tokens=16)
        return begun["said"]

    features(
        chat=ask,
        structured=lambda: ask(grammar=guidance.json(name="said", schema=Capital)),
        errors=ask,
    )


def instructor() -> None:
    import instructor

    def said(mode: Any, kind: Any, model: str = MODEL, key: str = KEY) -> Any:
        return instructor.from_openai(client(key), mode=mode).chat.completions.create(
            model=model, messages=MESSAGES, response_model=kind, max_tokens=128, max_retries=0
        )

    features(
        structured=lambda: said(instructor.Mode.JSON_SCHEMA, Capital),
        tools=lambda: said(instructor.Mode.TOOLS, Weather).model_dump(),
        errors=lambda model, key: said(instructor.Mode.TOOLS, Weather, model, key),
    )


def magentic() -> None:
    from magentic import OpenaiChatModel, StreamedStr, chatprompt
    from magentic.chat_model.message import UserMessage

    def ask(kind: type, model: str = MODEL, key: str = KEY) -> Any:
        chat = OpenaiChatModel(model, api_key=key, base_url=BASE_URL, max_tokens=128)

        @chatprompt(UserMessage(QUESTION), model=chat)
        def said() -> kind: ...  # type: ignore[valid-type]

        return said()

    features(
        chat=lambda: ask(str),
        stream=lambda: "".join(ask(StreamedStr)),
        structured=lambda: ask(Capital),
        errors=lambda model, key: ask(str, model, key),
    )


def mirascope() -> None:
    from mirascope import llm
    from mirascope.llm.providers import OpenAIProvider

    def model(name: str = MODEL, key: str = KEY, mode: str = "completions") -> Any:
        llm.register_provider(OpenAIProvider(api_key=key, base_url=BASE_URL), scope="openai/")
        return llm.Model(f"openai/{name}:{mode}", max_tokens=128)

    def agent() -> dict[str, Any]:
        said = model().call(WEATHER_QUESTION, tools=[llm.tool(weather)])
        return said.tool_calls[0].args

    features(
        chat=lambda: model().call(QUESTION).text(),
        stream=lambda: "".join(model().stream(QUESTION).text_stream()),
        agent=agent,
        structured=lambda: model().call(QUESTION, format=llm.format(Capital, mode="strict")).parse(),
        responses=lambda: model(mode="responses").call(QUESTION).text(),
        errors=lambda name, key: model(name, key).call(QUESTION),
    )


def outlines() -> None:
    import outlines
    from outlines.types import regex

    def ask(kind: Any = None, model: str = MODEL, key: str = KEY) -> str:
        return outlines.from_openai(client(key), model)(QUESTION, kind, max_tokens=64)

    def by_pattern() -> str:
        """By `structured_outputs`, which vLLM adds to OpenAI's form."""
        said = outlines.from_vllm(client(), MODEL)(QUESTION, regex(r"[a-z]{3}-[0-9]{2}"), max_tokens=64)
        expect(len(said) == 6 and said[3] == "-", said)
        return outlines.from_vllm(client(), MODEL)(QUESTION, Capital, max_tokens=64)

    features(
        chat=ask,
        stream=lambda: "".join(outlines.from_openai(client(), MODEL).stream(QUESTION, max_tokens=16)),
        structured=lambda: ask(Capital),
        grammar=by_pattern,
        errors=lambda model, key: ask(None, model, key),
    )


variant(
    {
        "guidance": guidance,
        "instructor": instructor,
        "magentic": magentic,
        "mirascope": mirascope,
        "outlines": outlines,
    }
)
