"""Haystack's generators and embedder for OpenAI's API."""

from typing import Any

from cases import BASE_URL, KEY, MODEL, QUESTION, WEATHER_PARAMETERS, features, main
from haystack.components.embedders import OpenAITextEmbedder
from haystack.components.generators.chat import OpenAIChatGenerator, OpenAIResponsesChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import Tool
from haystack.utils import Secret
from shapes import Capital

WEATHER = Tool(
    name="weather", description="The weather in a city.", parameters=WEATHER_PARAMETERS, function=lambda **_: "sunny"
)


def reply(
    model: str = MODEL, key: str = KEY, kind: Any = OpenAIChatGenerator, options: Any = None, **more: Any
) -> ChatMessage:
    generator = kind(
        api_key=Secret.from_token(key), model=model, api_base_url=BASE_URL, max_retries=0, timeout=120,
        generation_kwargs=options or {"max_tokens": 128}, **more,
    )  # fmt: skip
    return generator.run([ChatMessage.from_user(QUESTION)])["replies"][0]


def ask(model: str = MODEL, key: str = KEY) -> str | None:
    return reply(model, key).text


def stream() -> str:
    pieces: list[str] = []
    reply(streaming_callback=lambda chunk: pieces.append(chunk.content))
    return "".join(pieces)


def tools() -> dict[str, Any]:
    return reply(tools=[WEATHER], options={"max_tokens": 128, "tool_choice": "required"}).tool_calls[0].arguments


def embeddings() -> list[list[float]]:
    embedder = OpenAITextEmbedder(
        api_key=Secret.from_token(KEY), model=MODEL, api_base_url=BASE_URL, max_retries=0, timeout=120
    )
    return [embedder.run(text)["embedding"] for text in ("one", "two")]


features(
    chat=ask,
    stream=stream,
    tools=tools,
    structured=lambda: reply(options={"max_tokens": 128, "response_format": Capital}).text,
    responses=lambda: reply(kind=OpenAIResponsesChatGenerator, options={"max_output_tokens": 32}).text,
    embeddings=embeddings,
    errors=ask,
)
main()
