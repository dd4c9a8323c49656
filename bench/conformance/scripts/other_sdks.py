"""Python clients of other vendors whose API overlaps with OpenAI's, by `base_url`."""

import sys
from collections.abc import Iterator
from pathlib import Path
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
    WRONG_KEY,
    case,
    expect,
    expect_error,
    expect_weather,
    features,
    variant,
)

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "capital", "schema": SCHEMA}}


def cohere() -> None:
    """Only its `/v2/rerank` is served."""
    import cohere

    def rerank(model: str = MODEL, key: str = KEY) -> list[int]:
        client = cohere.ClientV2(key, base_url=ROOT_URL)
        return [result.index for result in client.rerank(model=model, query=QUESTION, documents=["one", "two"]).results]

    features(rerank=rerank, errors=rerank)


def huggingface() -> None:
    import huggingface_hub

    clients = {
        key: huggingface_hub.InferenceClient(base_url=BASE_URL, api_key=key, timeout=120) for key in (KEY, WRONG_KEY)
    }

    def ask(model: str = MODEL, key: str = KEY, **more: Any) -> Any:
        return clients[key].chat_completion(MESSAGES, model=model, max_tokens=128, **more)

    def answer(model: str = MODEL, key: str = KEY, **more: Any) -> str:
        return ask(model, key, **more).choices[0].message.content

    features(
        chat=answer,
        stream=lambda: "".join(chunk.choices[0].delta.content or "" for chunk in ask(stream=True) if chunk.choices),
        tools=lambda: ask(tools=[WEATHER], tool_choice="required").choices[0].message.tool_calls[0].function.arguments,
        structured=lambda: answer(response_format=FORMAT),
        errors=answer,
    )


def mistral() -> None:
    from mistralai.client import Mistral

    def client(key: str = KEY) -> Any:
        return Mistral(api_key=key, server_url=ROOT_URL, timeout_ms=120_000)

    def ask(model: str = MODEL, key: str = KEY, **more: Any) -> Any:
        return client(key).chat.complete(model=model, messages=MESSAGES, max_tokens=128, **more).choices[0].message

    def stream() -> Iterator[str]:
        for event in client().chat.stream(model=MODEL, messages=MESSAGES, max_tokens=16):
            yield str(event.data.choices[0].delta.content or "") if event.data.choices else ""

    features(
        chat=lambda: ask().content,
        stream=lambda: "".join(stream()),
        tools=lambda: ask(tools=[WEATHER], tool_choice="required").tool_calls[0].function.arguments,
        structured=lambda: ask(response_format=FORMAT).content,
        embeddings=lambda: [one.embedding for one in client().embeddings.create(model=MODEL, inputs=["a", "b"]).data],
        errors=ask,
    )


def switchyard() -> None:
    """Switchyard's own client, from this checkout."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "client"))
    from switchyard_client import Switchyard

    def ask(model: str = MODEL, key: str = KEY) -> str:
        with Switchyard(BASE_URL, api_key=key) as client:
            return client.chat(model, QUESTION, max_tokens=16).text

    def stream() -> str:
        with Switchyard(BASE_URL, api_key=KEY) as client, client.stream_chat(MODEL, QUESTION, max_tokens=16) as events:
            return "".join(event.text for event in events)

    def posted(path: str, **body: Any) -> Any:
        with Switchyard(BASE_URL, api_key=KEY) as client:
            return client.post(path, {"model": MODEL, **body}).json

    features(
        chat=ask,
        stream=stream,
        messages=lambda: posted("/messages", messages=MESSAGES, max_tokens=8)["content"][0]["text"],
        embeddings=lambda: [one["embedding"] for one in posted("/embeddings", input=["one", "two"])["data"]],
        errors=ask,
    )


def together() -> None:
    from together import Together

    def client(key: str = KEY) -> Any:
        return Together(api_key=key, base_url=ROOT_URL, max_retries=0, timeout=120)

    def ask(model: str = MODEL, key: str = KEY, **more: Any) -> Any:
        return client(key).chat.completions.create(model=model, messages=MESSAGES, max_tokens=128, **more)

    features(
        chat=lambda: ask().choices[0].message.content,
        stream=lambda: "".join(piece.choices[0].delta.content or "" for piece in ask(stream=True) if piece.choices),
        completions=lambda: client().completions.create(model=MODEL, prompt=BEGINNING, max_tokens=8).choices[0].text,
        tools=lambda: ask(tools=[WEATHER], tool_choice="required").choices[0].message.tool_calls[0].function.arguments,
        structured=lambda: ask(response_format=FORMAT).choices[0].message.content,
        embeddings=lambda: [one.embedding for one in client().embeddings.create(model=MODEL, input=["a", "b"]).data],
        errors=ask,
    )


def litellm() -> None:
    """LiteLLM as a library, over OpenAI's and Anthropic's forms."""
    import litellm

    litellm.telemetry = False
    every = {"model": f"openai/{MODEL}", "api_base": BASE_URL, "api_key": KEY, "num_retries": 0, "timeout": 120}

    @case("chat")
    def chat() -> None:
        answer = litellm.completion(messages=MESSAGES, max_tokens=16, **every)
        expect(answer.choices[0].message.content and answer.usage.completion_tokens <= 16, answer)

    @case("stream")
    def stream() -> None:
        chunks = list(
            litellm.completion(
                messages=MESSAGES, max_tokens=16, stream=True, stream_options={"include_usage": True}, **every
            )
        )
        expect("".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices), chunks)

    @case("tools")
    def tools() -> None:
        answer = litellm.completion(messages=MESSAGES, tools=[WEATHER], tool_choice="required", max_tokens=128, **every)
        expect_weather(answer.choices[0].message.tool_calls[0].function.arguments)

    @case("completions")
    def completions() -> None:
        ours = {**every, "model": f"text-completion-openai/{MODEL}"}
        expect(litellm.text_completion(prompt=BEGINNING, max_tokens=8, **ours).choices[0].text, "no text")

    @case("responses")
    def responses() -> None:
        expect(litellm.responses(input=QUESTION, max_output_tokens=16, **every).output, "no output")

    @case("messages")
    def messages() -> None:
        ours = {**every, "model": f"anthropic/{MODEL}", "api_base": BASE_URL.removesuffix("/v1")}
        expect(litellm.completion(messages=MESSAGES, max_tokens=16, **ours).choices[0].message.content, "no text")

    @case("embeddings")
    def embeddings() -> None:
        expect(len(litellm.embedding(input=["one", "two"], **every).data) == 2, "not two")

    @case("unknown_model")
    def unknown_model() -> None:
        ours = {**every, "model": "openai/gpt-9"}
        expect_error(litellm.NotFoundError, lambda: litellm.completion(messages=MESSAGES, **ours))

    @case("wrong_key")
    def wrong_key() -> None:
        ours = {**every, "api_key": "sw_000000000000_wrong"}
        expect_error(litellm.AuthenticationError, lambda: litellm.completion(messages=MESSAGES, **ours))

    @case("bad_request")
    def bad_request() -> None:
        expect_error(litellm.BadRequestError, lambda: litellm.completion(messages=MESSAGES, max_tokens=-1, **every))


variant({call.__name__: call for call in (
    cohere, huggingface, litellm, mistral, switchyard, together,
)})  # fmt: skip
