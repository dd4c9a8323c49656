"""anthropic: Anthropic's official client, whose base URL is the ingress without `/v1`."""

import anthropic
from cases import BASE_URL, KEY, MESSAGES, MODEL, WEATHER_PARAMETERS, case, expect, expect_error, expect_weather, main

ROOT = BASE_URL.removesuffix("/v1")
client = anthropic.Anthropic(base_url=ROOT, api_key=KEY, max_retries=0, timeout=120)
TOOL = {"name": "weather", "description": "The weather in a city.", "input_schema": WEATHER_PARAMETERS}


@case("messages")
def messages() -> None:
    answer = client.messages.create(model=MODEL, messages=MESSAGES, max_tokens=16, system="Be short.")
    expect(answer.content[0].text, answer)
    expect(answer.usage.input_tokens > 0 and 0 < answer.usage.output_tokens <= 16, answer.usage)
    expect(answer.stop_reason in {"end_turn", "max_tokens"}, answer)
    with client.messages.stream(model=MODEL, messages=MESSAGES, max_tokens=16) as stream:
        expect("".join(stream.text_stream), "no text")
        expect(stream.get_final_message().usage.output_tokens > 0, "no usage")


@case("count_tokens")
def count_tokens() -> None:
    counted = client.messages.count_tokens(model=MODEL, messages=MESSAGES).input_tokens
    used = client.messages.create(model=MODEL, messages=MESSAGES, max_tokens=1).usage.input_tokens
    expect(counted == used, (counted, used))


@case("tools")
def tools() -> None:
    answer = client.messages.create(
        model=MODEL, messages=MESSAGES, max_tokens=128, tools=[TOOL], tool_choice={"type": "tool", "name": "weather"}
    )
    calls = [part for part in answer.content if part.type == "tool_use"]
    expect(calls and calls[0].name == "weather", answer)
    expect_weather(calls[0].input)


@case("tools_stream")
def tools_stream() -> None:
    with client.messages.stream(
        model=MODEL, messages=MESSAGES, max_tokens=128, tools=[TOOL], tool_choice={"type": "any"}
    ) as stream:
        calls = [part for part in stream.get_final_message().content if part.type == "tool_use"]
    expect(calls, "no call")
    expect_weather(calls[0].input)


@case("stop")
def stop() -> None:
    answer = client.messages.create(model=MODEL, messages=MESSAGES, max_tokens=2)
    expect(answer.stop_reason == "max_tokens", answer)


@case("unknown_model")
def unknown_model() -> None:
    error = expect_error(
        anthropic.NotFoundError, lambda: client.messages.create(model="claude-9", messages=MESSAGES, max_tokens=4)
    )
    expect(error.body["type"] == "error", error.body)


@case("wrong_key")
def wrong_key() -> None:
    stranger = anthropic.Anthropic(base_url=ROOT, api_key="sw_000000000000_wrong", max_retries=0)
    error = expect_error(
        anthropic.AuthenticationError, lambda: stranger.messages.create(model=MODEL, messages=MESSAGES, max_tokens=4)
    )
    expect(error.body["error"]["type"] == "authentication_error", error.body)


@case("bad_request")
def bad_request() -> None:
    expect_error(
        anthropic.BadRequestError, lambda: client.messages.create(model=MODEL, messages=MESSAGES, max_tokens=-1)
    )


@case("cancel")
def cancel() -> None:
    with client.messages.stream(model=MODEL, messages=MESSAGES, max_tokens=256) as stream:
        next(iter(stream.text_stream))
    messages()


main()
