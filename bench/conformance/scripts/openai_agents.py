"""OpenAI's Agents SDK, over chat completions and over Responses."""

from typing import Any

from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool
from cases import BASE_URL, KEY, MODEL, QUESTION, features, main
from openai import AsyncOpenAI
from shapes import Capital, last_call, weather


def agent(model: str = MODEL, key: str = KEY, kind: type = OpenAIChatCompletionsModel, **more: Any) -> Agent:
    client = AsyncOpenAI(base_url=BASE_URL, api_key=key, max_retries=0, timeout=120)
    settings = ModelSettings(max_tokens=128, tool_choice="required" if "tools" in more else None)
    return Agent(name="one", model=kind(model, client), model_settings=settings, **more)


async def ask(model: str = MODEL, key: str = KEY, **more: Any) -> object:
    return (await Runner.run(agent(model, key, **more), QUESTION)).final_output


async def stream() -> str:
    said = Runner.run_streamed(agent(), QUESTION)
    events = [event async for event in said.stream_events() if event.type == "raw_response_event"]
    return "".join(event.data.delta for event in events if event.data.type == "response.output_text.delta")


async def tools(kind: type = OpenAIChatCompletionsModel) -> dict[str, str]:
    await ask(tools=[function_tool(weather)], kind=kind)
    return last_call()


features(
    chat=ask,
    stream=stream,
    tools=tools,
    structured=lambda: ask(output_type=Capital),
    responses=lambda: ask(kind=OpenAIResponsesModel),
    errors=ask,
)
main()
