"""Agent frameworks: an answer, a tool that the agent decides to call, and structured output. One function for each."""

import contextlib
import io
from collections.abc import Callable
from typing import Any

from cases import BASE_URL, KEY, MODEL, QUESTION, ROOT_URL, WEATHER_QUESTION, features, variant
from shapes import Capital, Weather, last_call, weather


def agent_framework() -> None:
    from agent_framework import Agent
    from agent_framework.openai import OpenAIChatClient, OpenAIChatCompletionClient
    from openai import AsyncOpenAI

    def agent(model: str = MODEL, key: str = KEY, kind: Any = OpenAIChatCompletionClient, **more: Any) -> Agent:
        client = AsyncOpenAI(base_url=BASE_URL, api_key=key, max_retries=0, timeout=120)
        return Agent(client=kind(model=model, async_client=client), **more)

    async def ask(model: str = MODEL, key: str = KEY, **more: Any) -> str:
        return (await agent(model, key, **more).run(QUESTION, options={"max_tokens": 128})).text

    async def stream() -> str:
        said = agent().run(QUESTION, stream=True, options={"max_tokens": 64})
        return "".join([str(piece.text or "") async for piece in said])

    async def with_tool() -> dict[str, str]:
        await agent(tools=[weather]).run(WEATHER_QUESTION, options={"max_tokens": 128})
        return last_call()

    async def structured() -> Any:
        return (await agent().run(QUESTION, options={"max_tokens": 128, "response_format": Capital})).value

    features(
        chat=ask,
        stream=stream,
        agent=with_tool,
        structured=structured,
        responses=lambda: ask(kind=OpenAIChatClient),
        errors=ask,
    )


def agno() -> None:
    from agno.agent import Agent
    from agno.models.message import Message
    from agno.models.openai.like import OpenAILike

    def llm(model: str = MODEL, key: str = KEY) -> OpenAILike:
        return OpenAILike(id=model, api_key=key, base_url=BASE_URL, max_retries=0, timeout=120, max_tokens=128)

    def agent(**more: Any) -> Agent:
        return Agent(model=llm(), telemetry=False, **more)

    async def ask() -> str:
        return str((await agent().arun(QUESTION)).content)

    def with_tool() -> dict[str, str]:
        agent(tools=[weather]).run(WEATHER_QUESTION)
        return last_call()

    features(
        chat=ask,
        stream=lambda: "".join(str(event.content or "") for event in agent().run(QUESTION, stream=True)),
        agent=with_tool,
        structured=lambda: agent(output_schema=Capital).run(QUESTION).content,
        errors=lambda model, key: llm(model, key).response([Message(role="user", content=QUESTION)]),
    )


def autogen() -> None:
    from autogen_agentchat.agents import AssistantAgent
    from autogen_ext.models.openai import OpenAIChatCompletionClient

    can = {
        "vision": False,
        "function_calling": True,
        "json_output": True,
        "family": "unknown",
        "structured_output": True,
    }

    def agent(model: str = MODEL, key: str = KEY, **more: Any) -> AssistantAgent:
        client = OpenAIChatCompletionClient(
            model=model, base_url=BASE_URL, api_key=key, max_retries=0, timeout=120, max_tokens=128, model_info=can
        )
        return AssistantAgent("one", client, system_message=None, **more)

    async def ask(model: str = MODEL, key: str = KEY, **more: Any) -> Any:
        return (await agent(model, key, **more).run(task=QUESTION)).messages[-1].content

    async def stream() -> str:
        pieces = [piece async for piece in agent(model_client_stream=True).run_stream(task=QUESTION)]
        return "".join(piece.content for piece in pieces if type(piece).__name__ == "ModelClientStreamingChunkEvent")

    async def with_tool() -> dict[str, str]:
        await agent(tools=[weather]).run(task=WEATHER_QUESTION)
        return last_call()

    features(chat=ask, stream=stream, agent=with_tool, structured=lambda: ask(output_content_type=Capital), errors=ask)


def crewai() -> None:
    from crewai import LLM, Agent
    from crewai.tools import tool

    def llm(model: str = MODEL, key: str = KEY, **more: Any) -> LLM:
        return LLM(
            model=model, provider="openai", base_url=BASE_URL, api_key=key, max_tokens=128, max_retries=0, timeout=120,
            **more,
        )  # fmt: skip

    def with_tool() -> dict[str, str]:
        given: dict[str, Any] = {"role": "reporter", "goal": "report the weather", "backstory": "You are short."}
        Agent(**given, llm=llm(), tools=[tool("weather")(weather)], max_iter=3).kickoff(WEATHER_QUESTION)
        return last_call()

    features(
        chat=quietly(lambda: llm().call(QUESTION)),
        stream=quietly(lambda: llm(stream=True).call(QUESTION)),
        agent=quietly(with_tool),
        structured=quietly(lambda: llm(response_format=Capital).call(QUESTION)),
        errors=lambda model, key: llm(model, key).call(QUESTION),
    )


def google_adk() -> None:
    from google.adk.agents import LlmAgent
    from google.adk.agents.run_config import RunConfig, StreamingMode
    from google.adk.models.lite_llm import LiteLlm
    from google.adk.models.llm_request import LlmRequest
    from google.adk.runners import InMemoryRunner
    from google.genai import types

    def content(text: str) -> types.Content:
        return types.Content(role="user", parts=[types.Part(text=text)])

    def llm(model: str = MODEL, key: str = KEY) -> LiteLlm:
        return LiteLlm(f"openai/{model}", api_base=BASE_URL, api_key=key, max_tokens=128, num_retries=0)

    async def ask(question: str = QUESTION, streams: bool = False, **more: Any) -> str:
        runner = InMemoryRunner(LlmAgent(name="one", model=llm(), **more), app_name="conformance")
        session = await runner.session_service.create_session(app_name="conformance", user_id="u")
        config = RunConfig(streaming_mode=StreamingMode.SSE if streams else StreamingMode.NONE, max_llm_calls=3)
        said = runner.run_async(user_id="u", session_id=session.id, new_message=content(question), run_config=config)
        texts = []
        async for event in said:
            if bool(event.partial) == streams and event.content:
                texts += [part.text or "" for part in event.content.parts or ()]
        return "".join(texts)

    async def fail(model: str, key: str) -> None:
        request = LlmRequest(model=f"openai/{model}", contents=[content(QUESTION)])
        async for _ in llm(model, key).generate_content_async(request):
            pass

    async def with_tool() -> dict[str, str]:
        await ask(question=WEATHER_QUESTION, tools=[weather])
        return last_call()

    features(
        chat=ask,
        stream=lambda: ask(streams=True),
        agent=with_tool,
        structured=lambda: ask(output_schema=Capital),
        errors=fail,
    )


def smolagents() -> None:
    from smolagents import ChatMessage, OpenAIModel, ToolCallingAgent, tool

    asked = [ChatMessage(role="user", content=[{"type": "text", "text": QUESTION}])]

    def model(name: str = MODEL, key: str = KEY) -> OpenAIModel:
        return OpenAIModel(name, BASE_URL, key, client_kwargs={"max_retries": 0, "timeout": 120}, max_tokens=128)

    def ask(name: str = MODEL, key: str = KEY) -> str:
        return str(model(name, key).generate(asked).content)

    def with_tool() -> dict[str, str]:
        ToolCallingAgent([tool(weather)], model(), max_steps=2, verbosity_level=0).run(WEATHER_QUESTION)
        return last_call()

    features(
        chat=ask,
        stream=lambda: "".join(piece.content or "" for piece in model().generate_stream(asked)),
        agent=with_tool,
        errors=ask,
    )


def strands() -> None:
    from strands import Agent, tool
    from strands.models.openai import OpenAIModel

    def agent(model: str = MODEL, key: str = KEY, **more: Any) -> Agent:
        given = {"base_url": BASE_URL, "api_key": key, "max_retries": 0, "timeout": 120}
        chat = OpenAIModel(client_args=given, model_id=model, params={"max_tokens": 512, "temperature": 0})
        return Agent(model=chat, callback_handler=None, **more)

    async def stream() -> str:
        return "".join([event.get("data", "") async for event in agent().stream_async(QUESTION)])

    def with_tool() -> dict[str, str]:
        agent(tools=[tool(weather)])(WEATHER_QUESTION)
        return last_call()

    features(
        chat=lambda: str(agent()(QUESTION)),
        stream=stream,
        agent=with_tool,
        structured=lambda: agent()(QUESTION, structured_output_model=Capital).structured_output,
        errors=lambda model, key: agent(model, key)(QUESTION),
    )


def quietly(call: Callable[[], Any]) -> Callable[[], Any]:
    """The same call, without what it draws on standard output."""

    def quiet() -> Any:
        with contextlib.redirect_stdout(io.StringIO()):
            return call()

    return quiet


def langgraph() -> None:
    """LangGraph: a graph of a model and its tool, by hand."""
    from langchain_core.messages import AIMessage
    from langchain_openai import ChatOpenAI
    from langgraph.graph import START, MessagesState, StateGraph
    from langgraph.prebuilt import ToolNode, tools_condition

    def graph(model: str = MODEL, key: str = KEY) -> Any:
        chat = ChatOpenAI(model=model, base_url=BASE_URL, api_key=key, max_retries=0, timeout=120, max_tokens=128)

        def call(state: MessagesState) -> dict[str, list[Any]]:
            was_called = any(isinstance(message, AIMessage) for message in state["messages"])
            bound = chat.bind_tools([weather], tool_choice="none" if was_called else "weather")
            return {"messages": [bound.invoke(state["messages"])]}

        built = StateGraph(MessagesState)
        built.add_node("model", call)
        built.add_node("tools", ToolNode([weather]))
        built.add_edge(START, "model")
        built.add_conditional_edges("model", tools_condition)
        built.add_edge("tools", "model")
        return built.compile()

    def asked(model: str = MODEL, key: str = KEY) -> str:
        return graph(model, key).invoke({"messages": [("user", QUESTION)]})["messages"][-1].content

    def stream() -> str:
        pieces = graph().stream({"messages": [("user", QUESTION)]}, stream_mode="messages")
        return "".join(str(piece.content) for piece, _ in pieces)

    def tools() -> dict[str, str]:
        asked()
        return last_call()

    features(chat=asked, stream=stream, tools=tools, errors=asked)


def openai_agents() -> None:
    """OpenAI's Agents SDK, over chat completions and over Responses."""
    from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool
    from openai import AsyncOpenAI

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


def pydantic_ai() -> None:
    """Pydantic AI, over chat completions, Responses and Anthropic's messages."""
    from pydantic_ai import Agent, ModelSettings, NativeOutput, ToolOutput
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.anthropic import AnthropicProvider
    from pydantic_ai.providers.openai import OpenAIProvider

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


variant({call.__name__: call for call in (
    agent_framework, agno, autogen, crewai, google_adk, langgraph, openai_agents, pydantic_ai, smolagents, strands,
)})  # fmt: skip
