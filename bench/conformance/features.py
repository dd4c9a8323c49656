"""What a client of others may want of an ingress: one row for each feature, in the order of the table of results."""

from typing import Final

FEATURES: Final[dict[str, str]] = {
    "models": "lists the models, and gets one",
    "chat": "one answer to a conversation",
    "stream": "the same as a stream, with its usage",
    "completions": "continues a text, whole and as a stream",
    "tools": "calls a tool, with arguments that fit its schema",
    "tools_stream": "the same as a stream",
    "structured": "an answer that fits a JSON schema",
    "logprobs": "probabilities of tokens",
    "choices": "several answers to one question",
    "stop": "ends where it is told to, or at a length",
    "seed": "the same seed gives the same answer",
    "responses": "OpenAI's Responses, whole and as a stream",
    "messages": "Anthropic's messages, whole and as a stream",
    "count_tokens": "counts the tokens of a message",
    "embeddings": "vectors of texts",
    "unknown_model": "404 arrives as the client's own error",
    "wrong_key": "401 arrives as the client's own error",
    "bad_request": "400 arrives as the client's own error, and names the parameter",
    "cancel": "a stream that is left early; the next request is answered",
    "concurrent": "50 streams at once, all of them whole",
    "load": "a load generator's run without a failure",
}
