"""LangChain's ChatOpenAI and ChatAnthropic."""

from typing import Any

from cases import BASE_URL, KEY, MODEL, QUESTION, ROOT_URL, expect, features, variant
from shapes import Capital, weather


def text_of(message: Any) -> str:
    expect(message.usage_metadata["output_tokens"] <= 128, message)
    return message.text


def openai() -> None:
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
        chat=lambda: text_of(model().invoke(QUESTION)),
        stream=lambda: "".join(chunk.text for chunk in model(stream_usage=True).stream(QUESTION)),
        tools=lambda: model().bind_tools([weather], tool_choice="weather").invoke(QUESTION).tool_calls[0]["args"],
        structured=lambda: model().with_structured_output(Capital, method="json_schema").invoke(QUESTION),
        responses=lambda: text_of(model(use_responses_api=True).invoke(QUESTION)),
        embeddings=embeddings,
        errors=lambda name, key: model(name, key).invoke(QUESTION),
    )


def anthropic() -> None:
    from langchain_anthropic import ChatAnthropic

    def model(name: str = MODEL, key: str = KEY) -> ChatAnthropic:
        return ChatAnthropic(model=name, base_url=ROOT_URL, api_key=key, max_retries=0, timeout=120, max_tokens=128)

    features(
        messages=lambda: text_of(model().invoke(QUESTION)),
        stream=lambda: "".join(chunk.text for chunk in model().stream(QUESTION)),
        tools=lambda: model().bind_tools([weather], tool_choice="weather").invoke(QUESTION).tool_calls[0]["args"],
        structured=lambda: model().with_structured_output(Capital).invoke(QUESTION),
        errors=lambda name, key: model(name, key).invoke(QUESTION),
    )


variant({"anthropic": anthropic, "openai": openai})
