"""What a client may use of an ingress: the features that scripts report, and the columns of the page."""

from typing import Final

FEATURES: Final[dict[str, str]] = {
    "models": "lists the models and gets one",
    "chat": "one answer to a conversation",
    "logprobs": "probabilities of tokens",
    "choices": "several answers to one question",
    "stop": "ends at a stop sequence or at a length",
    "seed": "the same seed gives the same answer",
    "stream": "an answer as a stream",
    "cancel": "a stream that the client leaves; the next request is answered",
    "concurrent": "50 streams at the same time, all of them whole",
    "completions": "continues a text",
    "tools": "a tool call that the request requires, with arguments that fit its schema",
    "tools_stream": "the same as a stream",
    "agent": "the model decides to call a tool and answers with its result",
    "structured": "an answer that fits a JSON schema",
    "grammar": "an answer that fits a regular expression, by vLLM's `structured_outputs`",
    "responses": "OpenAI's Responses",
    "messages": "Anthropic's messages",
    "count_tokens": "counts the tokens of a message",
    "tokenize": "text to tokens and back",
    "embeddings": "vectors of texts",
    "rerank": "documents ordered by relevance",
    "unknown_model": "404 arrives as the client's own error",
    "wrong_key": "401 arrives as the client's own error",
    "bad_request": "400 arrives as the client's own error and names the parameter",
    "load": "a load generator's run without a failed request",
}

COLUMNS: Final[dict[str, tuple[str, ...]]] = {
    "models": ("models",),
    "chat": ("chat", "logprobs", "choices", "stop", "seed"),
    "stream": ("stream", "cancel", "concurrent"),
    "completions": ("completions",),
    "tools": ("tools", "tools_stream"),
    "agent": ("agent",),
    "structured": ("structured", "grammar"),
    "responses": ("responses",),
    "messages": ("messages", "count_tokens"),
    "vectors": ("embeddings", "rerank"),
    "tokens": ("tokenize",),
    "errors": ("unknown_model", "wrong_key", "bad_request"),
    "load": ("load",),
}
"""Each feature is in one column."""
