"""DSPy: a language model, a signature by its JSON adapter, and an embedder."""

import dspy
from cases import BASE_URL, KEY, MODEL, QUESTION, features, main

NAME = f"openai/{MODEL}"


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
    embed = dspy.Embedder(NAME, api_base=BASE_URL, api_key=KEY, caching=False)
    return embed(["one", "two"])


features(chat=ask, structured=structured, embeddings=embeddings, errors=ask)
main()
