"""Frameworks and routers that keep a wire form of their own behind OpenAI's. One function for each."""

from typing import Any

from cases import BASE_URL, KEY, MESSAGES, MODEL, QUESTION, WEATHER, features, variant
from shapes import Capital


def aisuite() -> None:
    import aisuite

    def ask(model: str = MODEL, key: str = KEY, **more: Any) -> Any:
        client = aisuite.Client({"openai": {"base_url": BASE_URL, "api_key": key, "max_retries": 0, "timeout": 120}})
        return client.chat.completions.create(f"openai:{model}", MESSAGES, max_tokens=128, **more)

    features(
        chat=lambda: ask().choices[0].message.content,
        tools=lambda: ask(tools=[WEATHER], tool_choice="required").choices[0].message.tool_calls[0].function.arguments,
        errors=ask,
    )


def any_llm() -> None:
    import any_llm

    ours: dict[str, Any] = {"provider": "openai", "api_base": BASE_URL, "client_args": {"max_retries": 0}}

    def ask(model: str = MODEL, key: str = KEY, **more: Any) -> Any:
        return any_llm.completion(model, MESSAGES, api_key=key, max_tokens=128, **ours, **more)

    def embeddings() -> list[list[float]]:
        made = any_llm.embedding(MODEL, ["one", "two"], api_key=KEY, **ours)
        return [one.embedding for one in made.data]

    features(
        chat=lambda: ask().choices[0].message.content,
        stream=lambda: "".join(piece.choices[0].delta.content or "" for piece in ask(stream=True) if piece.choices),
        tools=lambda: ask(tools=[WEATHER], tool_choice="required").choices[0].message.tool_calls[0].function.arguments,
        structured=lambda: ask(response_format=Capital).choices[0].message.content,
        responses=lambda: any_llm.responses(MODEL, QUESTION, api_key=KEY, max_output_tokens=32, **ours).output_text,
        embeddings=embeddings,
        errors=ask,
    )


def semantic_kernel() -> None:
    from openai import AsyncOpenAI
    from semantic_kernel.connectors.ai.open_ai import (
        OpenAIChatCompletion,
        OpenAIChatPromptExecutionSettings,
        OpenAITextEmbedding,
    )
    from semantic_kernel.contents import ChatHistory

    def client(key: str = KEY) -> AsyncOpenAI:
        return AsyncOpenAI(base_url=BASE_URL, api_key=key, max_retries=0, timeout=120)

    def asked(model: str = MODEL, key: str = KEY, **more: Any) -> tuple[Any, dict[str, Any]]:
        history = ChatHistory()
        history.add_user_message(QUESTION)
        settings = OpenAIChatPromptExecutionSettings(max_tokens=128, **more)
        service = OpenAIChatCompletion(ai_model_id=model, async_client=client(key))
        return service, {"chat_history": history, "settings": settings}

    async def ask(model: str = MODEL, key: str = KEY, **more: Any) -> str:
        service, given = asked(model, key, **more)
        return str(await service.get_chat_message_content(**given))

    async def stream() -> str:
        service, given = asked()
        return "".join([str(piece) async for piece in service.get_streaming_chat_message_content(**given)])

    async def embeddings() -> Any:
        service = OpenAITextEmbedding(ai_model_id=MODEL, async_client=client())
        return await service.generate_embeddings(["one", "two"])

    features(
        chat=ask,
        stream=stream,
        structured=lambda: ask(response_format=Capital),
        embeddings=embeddings,
        errors=ask,
    )


def griptape() -> None:
    from griptape.artifacts import ErrorArtifact
    from griptape.drivers.embedding.openai import OpenAiEmbeddingDriver
    from griptape.drivers.prompt.openai import OpenAiChatPromptDriver
    from griptape.structures import Agent
    from griptape.tokenizers import SimpleTokenizer
    from griptape.utils import Stream

    def agent(model: str = MODEL, key: str = KEY, *, stream: bool = False, **more: Any) -> Agent:
        driver = OpenAiChatPromptDriver(
            model=model, base_url=BASE_URL, api_key=key, max_tokens=128, max_attempts=1, stream=stream
        )
        return Agent(prompt_driver=driver, stream=stream, **more)

    def ask(model: str = MODEL, key: str = KEY, **more: Any) -> Any:
        said = agent(model, key, **more).run(QUESTION).output
        if isinstance(said, ErrorArtifact):
            raise said.exception
        return said.value

    def embeddings() -> list[list[float]]:
        driver = OpenAiEmbeddingDriver(
            model=MODEL,
            base_url=BASE_URL,
            api_key=KEY,
            max_attempts=1,
            tokenizer=SimpleTokenizer(characters_per_token=4),
        )
        return [driver.embed(text) for text in ("one", "two")]

    features(
        chat=ask,
        stream=lambda: "".join(str(piece.value) for piece in Stream(agent(stream=True)).run(QUESTION)),
        structured=lambda: ask(output_schema=Capital),
        embeddings=embeddings,
        errors=ask,
    )


def chatlas() -> None:
    import chatlas

    def chat(model: str = MODEL, key: str = KEY, kind: Any = chatlas.ChatOpenAICompletions) -> Any:
        return kind(model=model, base_url=BASE_URL, api_key=key, kwargs={"max_retries": 0, "timeout": 120})

    def ask(model: str = MODEL, key: str = KEY, **more: Any) -> str:
        return str(chat(model, key, **more).chat(QUESTION, echo="none"))

    features(
        chat=ask,
        stream=lambda: "".join(chat().stream(QUESTION)),
        structured=lambda: chat().chat_structured(QUESTION, data_model=Capital, echo="none"),
        responses=lambda: ask(kind=chatlas.ChatOpenAI),
        errors=ask,
    )


variant(
    {
        "aisuite": aisuite,
        "any_llm": any_llm,
        "chatlas": chatlas,
        "griptape": griptape,
        "semantic_kernel": semantic_kernel,
    }
)
