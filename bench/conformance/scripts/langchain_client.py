"""LangChain's ChatOpenAI."""

from typing import Literal

from cases import BASE_URL, KEY, MODEL, QUESTION, case, expect, expect_error, expect_weather, main
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from openai import AuthenticationError, NotFoundError
from pydantic import BaseModel


def model(name: str = MODEL, key: str = KEY, **more: object) -> ChatOpenAI:
    more = {"max_tokens": 128, **more}
    return ChatOpenAI(model=name, base_url=BASE_URL, api_key=key, max_retries=0, timeout=120, **more)


class Capital(BaseModel):
    """The capital of a country."""

    city: str
    size: Literal["small", "large"]


@tool
def weather(city: str, unit: Literal["celsius", "fahrenheit"]) -> str:
    """The weather in a city."""
    return f"{city} {unit}"


@case("chat")
def chat() -> None:
    answer = model(max_tokens=16).invoke(QUESTION)
    expect(answer.content and answer.usage_metadata["output_tokens"] <= 16, answer)


@case("stream")
def stream() -> None:
    expect("".join(str(chunk.content) for chunk in model(max_tokens=16, stream_usage=True).stream(QUESTION)), "no text")


@case("tools")
def tools() -> None:
    answer = model().bind_tools([weather], tool_choice="weather").invoke(QUESTION)
    expect_weather(answer.tool_calls[0]["args"])


@case("structured")
def structured() -> None:
    said = model().with_structured_output(Capital, method="json_schema").invoke(QUESTION)
    expect(isinstance(said, Capital), said)


@case("responses")
def responses() -> None:
    expect(model(use_responses_api=True, max_tokens=16).invoke(QUESTION).content, "no text")


@case("embeddings")
def embeddings() -> None:
    vectors = OpenAIEmbeddings(
        model=MODEL, base_url=BASE_URL, api_key=KEY, max_retries=0, check_embedding_ctx_length=False
    ).embed_documents(["one", "two"])
    expect(len(vectors) == 2 and len(vectors[0]) > 1, vectors)


@case("unknown_model")
def unknown_model() -> None:
    expect_error(NotFoundError, lambda: model("gpt-9").invoke(QUESTION))


@case("wrong_key")
def wrong_key() -> None:
    expect_error(AuthenticationError, lambda: model(key="sw_000000000000_wrong").invoke(QUESTION))


main()
