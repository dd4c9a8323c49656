"""openai-python: the official client, whole."""

import asyncio
import json
from typing import Literal

import openai
from cases import BASE_URL, KEY, MESSAGES, MODEL, QUESTION, WEATHER, case, expect, expect_error, expect_weather, main
from pydantic import BaseModel

BEGINNING = "The capital of France is"
client = openai.OpenAI(base_url=BASE_URL, api_key=KEY, max_retries=0, timeout=120)


class Capital(BaseModel):
    city: str
    size: Literal["small", "large"]


@case("models")
def models() -> None:
    listed = {model.id: model for model in client.models.list()}
    expect(MODEL in listed, list(listed))
    expect(client.models.retrieve(MODEL).id == MODEL, listed)
    expect(listed[MODEL].created > 0, listed[MODEL])


@case("chat")
def chat() -> None:
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=16)
    expect(answer.choices[0].message.content, answer)
    expect(answer.usage and answer.usage.prompt_tokens > 0 and answer.usage.completion_tokens <= 16, answer.usage)
    expect(answer.choices[0].finish_reason in {"stop", "length"}, answer)


@case("stream")
def stream() -> None:
    chunks = list(
        client.chat.completions.create(
            model=MODEL, messages=MESSAGES, max_tokens=16, stream=True, stream_options={"include_usage": True}
        )
    )
    expect("".join(c.choices[0].delta.content or "" for c in chunks if c.choices), chunks)
    expect(chunks[-1].usage and chunks[-1].usage.completion_tokens > 0, chunks[-1])


@case("completions")
def completions() -> None:
    expect(
        client.completions.create(model=MODEL, prompt=BEGINNING, max_tokens=8).choices[0].text,
        "no text",
    )
    pieces = client.completions.create(model=MODEL, prompt=BEGINNING, max_tokens=8, stream=True)
    expect("".join(piece.choices[0].text for piece in pieces if piece.choices), "no text")


@case("tools")
def tools() -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, tools=[WEATHER], tool_choice="required", max_tokens=128
    )
    calls = answer.choices[0].message.tool_calls or []
    expect(calls and calls[0].function.name == "weather", answer)
    expect_weather(calls[0].function.arguments)


@case("tools_stream")
def tools_stream() -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    name = arguments = ""
    for chunk in client.chat.completions.create(
        model=MODEL, messages=MESSAGES, tools=[WEATHER], tool_choice=named, max_tokens=128, stream=True
    ):
        for call in (chunk.choices[0].delta.tool_calls or []) if chunk.choices else []:
            name += call.function.name or ""
            arguments += call.function.arguments or ""
    expect(name == "weather", name)
    expect_weather(arguments)


@case("structured")
def structured() -> None:
    answer = client.chat.completions.parse(model=MODEL, messages=MESSAGES, response_format=Capital, max_tokens=128)
    expect(isinstance(answer.choices[0].message.parsed, Capital), answer)


@case("logprobs")
def logprobs() -> None:
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=4, logprobs=True, top_logprobs=2)
    said = answer.choices[0].logprobs
    expect(said and said.content and len(said.content[0].top_logprobs) == 2, said)
    expect(len(said.content) == answer.usage.completion_tokens, said)


@case("choices")
def choices() -> None:
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=8, n=3, temperature=1.0)
    expect([choice.index for choice in answer.choices] == [0, 1, 2], answer)


@case("stop")
def stop() -> None:
    whole = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=16, temperature=0, seed=1)
    text = whole.choices[0].message.content or ""
    word = text.split()[1]
    cut = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=16, temperature=0, seed=1, stop=[word]
    )
    expect(cut.choices[0].finish_reason == "stop" and word not in (cut.choices[0].message.content or ""), cut)
    short = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_completion_tokens=2)
    expect(short.choices[0].finish_reason == "length", short)


@case("seed")
def seed() -> None:
    texts = {
        client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=12, seed=7, temperature=1.0)
        .choices[0]
        .message.content
        for _ in range(2)
    }
    expect(len(texts) == 1, texts)


@case("responses")
def responses() -> None:
    answer = client.responses.create(model=MODEL, input=QUESTION, max_output_tokens=16)
    expect(answer.output_text, answer)
    expect(answer.usage and answer.usage.output_tokens > 0, answer.usage)
    with client.responses.stream(model=MODEL, input=QUESTION, max_output_tokens=16) as stream:
        events = list(stream)
    expect("".join(event.delta for event in events if event.type == "response.output_text.delta"), events)
    expect(events[0].type == "response.created", events[0])
    expect(events[-1].type in {"response.completed", "response.incomplete"}, events[-1])


@case("embeddings")
def embeddings() -> None:
    answer = client.embeddings.create(model=MODEL, input=["one", "two"])
    expect(len(answer.data) == 2 and len(answer.data[0].embedding) > 1, answer)


@case("unknown_model")
def unknown_model() -> None:
    error = expect_error(openai.NotFoundError, lambda: client.chat.completions.create(model="gpt-9", messages=MESSAGES))
    expect("gpt-9" in str(error), error)


@case("wrong_key")
def wrong_key() -> None:
    stranger = openai.OpenAI(base_url=BASE_URL, api_key="sw_000000000000_wrong", max_retries=0)
    expect_error(openai.AuthenticationError, lambda: stranger.chat.completions.create(model=MODEL, messages=MESSAGES))


@case("bad_request")
def bad_request() -> None:
    error = expect_error(
        openai.BadRequestError,
        lambda: client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=-1),
    )
    expect("max_tokens" in str(error), error)


@case("cancel")
def cancel() -> None:
    with client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=256, stream=True) as stream:
        next(iter(stream))
    chat()


@case("concurrent")
def concurrent() -> None:
    async def one(asked: openai.AsyncOpenAI) -> str:
        stream = await asked.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=8, stream=True)
        return "".join([c.choices[0].delta.content or "" async for c in stream if c.choices])

    async def all_of_them() -> list[str]:
        async with openai.AsyncOpenAI(base_url=BASE_URL, api_key=KEY, timeout=240) as asked:
            return await asyncio.gather(*(one(asked) for _ in range(50)))

    texts = asyncio.run(all_of_them())
    expect(len(texts) == 50 and all(texts), json.dumps(texts))


main()
