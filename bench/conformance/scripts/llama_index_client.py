"""llama-index: OpenAILike and its embedder."""

import openai
from cases import BASE_URL, KEY, MODEL, QUESTION, case, expect, expect_error, main
from llama_index.core.llms import ChatMessage
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike


def model(name: str = MODEL, key: str = KEY) -> OpenAILike:
    return OpenAILike(
        model=name, api_base=BASE_URL, api_key=key, is_chat_model=True, max_tokens=16, max_retries=0, timeout=120
    )


ASKED = [ChatMessage(role="user", content=QUESTION)]


@case("chat")
def chat() -> None:
    expect(model().chat(ASKED).message.content, "no text")


@case("stream")
def stream() -> None:
    expect("".join(piece.delta or "" for piece in model().stream_chat(ASKED)), "no text")


@case("completions")
def completions() -> None:
    plain = OpenAILike(model=MODEL, api_base=BASE_URL, api_key=KEY, is_chat_model=False, max_tokens=8, max_retries=0)
    expect(plain.complete("The capital of France is").text, "no text")


@case("embeddings")
def embeddings() -> None:
    embed = OpenAILikeEmbedding(model_name=MODEL, api_base=BASE_URL, api_key=KEY, max_retries=0, timeout=120)
    vectors = embed.get_text_embedding_batch(["one", "two"])
    expect(len(vectors) == 2 and len(vectors[0]) > 1, vectors)


@case("unknown_model")
def unknown_model() -> None:
    expect_error(openai.NotFoundError, lambda: model("gpt-9").chat(ASKED))


@case("wrong_key")
def wrong_key() -> None:
    expect_error(openai.AuthenticationError, lambda: model(key="sw_000000000000_wrong").chat(ASKED))


main()
