"""Application frameworks and routers. One function for each."""

from typing import Any

from cases import (
    BASE_URL,
    BEGINNING,
    KEY,
    MESSAGES,
    MODEL,
    QUESTION,
    ROOT_URL,
    WEATHER,
    WEATHER_PARAMETERS,
    case,
    expect,
    expect_error,
    features,
    variant,
)
from shapes import Capital, weather


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


def _text_of(message: Any) -> str:
    expect(message.usage_metadata["output_tokens"] <= 128, message)
    return message.text


def langchain() -> None:
    from langchain_openai import ChatOpenAI, OpenAIEmbeddings

    def model(name: str = MODEL, key: str = KEY, **more: Any) -> ChatOpenAI:
        return ChatOpenAI(
            model=name, base_url=BASE_URL, api_key=key, max_retries=0, timeout=120, max_tokens=128, **more
        )

    def embeddings() -> list[list[float]]:
        return OpenAIEmbeddings(
            model=MODEL, base_url=BASE_URL, api_key=KEY, max_retries=0, check_embedding_ctx_length=False
        ).embed_documents(["one", "two"])

    features(
        chat=lambda: _text_of(model().invoke(QUESTION)),
        stream=lambda: "".join(chunk.text for chunk in model(stream_usage=True).stream(QUESTION)),
        tools=lambda: model().bind_tools([weather], tool_choice="weather").invoke(QUESTION).tool_calls[0]["args"],
        structured=lambda: model().with_structured_output(Capital, method="json_schema").invoke(QUESTION),
        responses=lambda: _text_of(model(use_responses_api=True).invoke(QUESTION)),
        embeddings=embeddings,
        errors=lambda name, key: model(name, key).invoke(QUESTION),
    )


def langchain_anthropic() -> None:
    from langchain_anthropic import ChatAnthropic

    def model(name: str = MODEL, key: str = KEY) -> ChatAnthropic:
        return ChatAnthropic(model=name, base_url=ROOT_URL, api_key=key, max_retries=0, timeout=120, max_tokens=128)

    features(
        messages=lambda: _text_of(model().invoke(QUESTION)),
        stream=lambda: "".join(chunk.text for chunk in model().stream(QUESTION)),
        tools=lambda: model().bind_tools([weather], tool_choice="weather").invoke(QUESTION).tool_calls[0]["args"],
        structured=lambda: model().with_structured_output(Capital).invoke(QUESTION),
        errors=lambda name, key: model(name, key).invoke(QUESTION),
    )


def llama_index() -> None:
    import openai
    from llama_index.core.llms import ChatMessage
    from llama_index.embeddings.openai_like import OpenAILikeEmbedding
    from llama_index.llms.openai_like import OpenAILike

    def model(name: str = MODEL, key: str = KEY) -> OpenAILike:
        return OpenAILike(
            model=name, api_base=BASE_URL, api_key=key, is_chat_model=True, max_tokens=16, max_retries=0, timeout=120
        )

    asked = [ChatMessage(role="user", content=QUESTION)]

    @case("chat")
    def chat() -> None:
        expect(model().chat(asked).message.content, "no text")

    @case("stream")
    def stream() -> None:
        expect("".join(piece.delta or "" for piece in model().stream_chat(asked)), "no text")

    @case("completions")
    def completions() -> None:
        plain = OpenAILike(
            model=MODEL, api_base=BASE_URL, api_key=KEY, is_chat_model=False, max_tokens=8, max_retries=0
        )
        expect(plain.complete(BEGINNING).text, "no text")

    @case("embeddings")
    def embeddings() -> None:
        embed = OpenAILikeEmbedding(model_name=MODEL, api_base=BASE_URL, api_key=KEY, max_retries=0, timeout=120)
        vectors = embed.get_text_embedding_batch(["one", "two"])
        expect(len(vectors) == 2 and len(vectors[0]) > 1, vectors)

    @case("unknown_model")
    def unknown_model() -> None:
        expect_error(openai.NotFoundError, lambda: model("gpt-9").chat(asked))

    @case("wrong_key")
    def wrong_key() -> None:
        expect_error(openai.AuthenticationError, lambda: model(key="sw_000000000000_wrong").chat(asked))


def haystack() -> None:
    from haystack.components.embedders import OpenAITextEmbedder
    from haystack.components.generators.chat import OpenAIChatGenerator, OpenAIResponsesChatGenerator
    from haystack.dataclasses import ChatMessage
    from haystack.tools import Tool
    from haystack.utils import Secret

    tool = Tool(
        name="weather",
        description="The weather in a city.",
        parameters=WEATHER_PARAMETERS,
        function=lambda **_: "sunny",
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
        return reply(tools=[tool], options={"max_tokens": 128, "tool_choice": "required"}).tool_calls[0].arguments

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


def dspy() -> None:
    import dspy

    name = f"openai/{MODEL}"

    class Capital(dspy.Signature):
        question: str = dspy.InputField()
        city: str = dspy.OutputField()

    class SchemaLM(dspy.LM):
        """DSPy looks up in a catalogue of known models whether a model takes a schema."""

        supports_response_schema = True
        supported_params = frozenset({"response_format", "max_tokens"})

    def lm(model: str = MODEL, key: str = KEY) -> dspy.LM:
        return SchemaLM(
            f"openai/{model}", api_base=BASE_URL, api_key=key, max_tokens=256, num_retries=0, cache=False, timeout=120
        )

    def ask(model: str = MODEL, key: str = KEY) -> str:
        answer = lm(model, key)(QUESTION)[0]
        return answer if isinstance(answer, str) else answer["text"]

    def structured() -> object:
        with dspy.context(lm=lm(), adapter=dspy.JSONAdapter()):
            return dspy.Predict(Capital)(question=QUESTION)

    def embeddings() -> object:
        embed = dspy.Embedder(name, api_base=BASE_URL, api_key=KEY, caching=False)
        return embed(["one", "two"])

    features(chat=ask, structured=structured, embeddings=embeddings, errors=ask)


variant({call.__name__: call for call in (
    aisuite, any_llm, chatlas, dspy, griptape, haystack, langchain, langchain_anthropic, llama_index, semantic_kernel,
)})  # fmt: skip
