"""Pydantic AI, over chat completions, Responses and Anthropic's messages."""

from typing import Any

from cases import BASE_URL, KEY, MODEL, QUESTION, ROOT_URL, WEATHER_QUESTION, features, main
from pydantic_ai import Agent, ModelSettings, NativeOutput, ToolOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider
from shapes import Capital, Weather, last_call, weather


def agent(model: str = MODEL, key: str = KEY, kind: Any = OpenAIChatModel, **more: Any) -> Agent[None, Any]:
    provider = OpenAIProvider(base_url=BASE_URL, api_key=key)
    return Agent(kind(model, provider=provider), model_settings=ModelSettings(max_tokens=128), retries=0, **more)


def ask(model: str = MODEL, key: str = KEY, **more: Any) -> Any:
    return agent(model, key, **more).run_sync(QUESTION).output


async def stream() -> str:
    async with agent().run_stream(QUESTION) as said:
        return "".join([piece async for piece in said.stream_text(delta=True)])


def with_tool() -> dict[str, str]:
    agent(tools=[weather]).run_sync(WEATHER_QUESTION)
    return last_call()


def messages() -> str:
    model = AnthropicModel(MODEL, provider=AnthropicProvider(base_url=ROOT_URL, api_key=KEY))
    return Agent(model, model_settings=ModelSettings(max_tokens=64)).run_sync(QUESTION).output


features(
    chat=ask,
    stream=stream,
    tools=lambda: ask(output_type=ToolOutput(Weather)).model_dump(),
    agent=with_tool,
    structured=lambda: ask(output_type=NativeOutput(Capital)),
    responses=lambda: ask(kind=OpenAIResponsesModel),
    messages=messages,
    errors=ask,
)
main()
