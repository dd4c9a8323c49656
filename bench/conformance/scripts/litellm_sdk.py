"""LiteLLM as a library, over OpenAI's and Anthropic's forms."""

import litellm
from cases import BASE_URL, KEY, MESSAGES, MODEL, QUESTION, WEATHER, case, expect, expect_error, expect_weather, main

litellm.telemetry = False
OURS = {"model": f"openai/{MODEL}", "api_base": BASE_URL, "api_key": KEY, "num_retries": 0, "timeout": 120}


@case("chat")
def chat() -> None:
    answer = litellm.completion(messages=MESSAGES, max_tokens=16, **OURS)
    expect(answer.choices[0].message.content and answer.usage.completion_tokens <= 16, answer)


@case("stream")
def stream() -> None:
    chunks = list(
        litellm.completion(
            messages=MESSAGES, max_tokens=16, stream=True, stream_options={"include_usage": True}, **OURS
        )
    )
    expect("".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices), chunks)


@case("tools")
def tools() -> None:
    answer = litellm.completion(messages=MESSAGES, tools=[WEATHER], tool_choice="required", max_tokens=128, **OURS)
    expect_weather(answer.choices[0].message.tool_calls[0].function.arguments)


@case("completions")
def completions() -> None:
    ours = {**OURS, "model": f"text-completion-openai/{MODEL}"}
    expect(litellm.text_completion(prompt="The capital of France is", max_tokens=8, **ours).choices[0].text, "no text")


@case("responses")
def responses() -> None:
    expect(litellm.responses(input=QUESTION, max_output_tokens=16, **OURS).output, "no output")


@case("messages")
def messages() -> None:
    ours = {**OURS, "model": f"anthropic/{MODEL}", "api_base": BASE_URL.removesuffix("/v1")}
    expect(litellm.completion(messages=MESSAGES, max_tokens=16, **ours).choices[0].message.content, "no text")


@case("embeddings")
def embeddings() -> None:
    expect(len(litellm.embedding(input=["one", "two"], **OURS).data) == 2, "not two")


@case("unknown_model")
def unknown_model() -> None:
    ours = {**OURS, "model": "openai/gpt-9"}
    expect_error(litellm.NotFoundError, lambda: litellm.completion(messages=MESSAGES, **ours))


@case("wrong_key")
def wrong_key() -> None:
    ours = {**OURS, "api_key": "sw_000000000000_wrong"}
    expect_error(litellm.AuthenticationError, lambda: litellm.completion(messages=MESSAGES, **ours))


@case("bad_request")
def bad_request() -> None:
    expect_error(litellm.BadRequestError, lambda: litellm.completion(messages=MESSAGES, max_tokens=-1, **OURS))


main()
