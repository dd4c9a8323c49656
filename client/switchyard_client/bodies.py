"""Types of request bodies, for type checkers and editors: members of OpenAI's and Anthropic's API, and those of vLLM
that ingresses pass on. `post` and `stream` also take any other mapping."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Required, TypedDict


class Message(TypedDict, total=False):
    """One message of a chat. `content`: a text, or parts such as `{"type": "text", "text": …}`."""

    role: Required[Literal["system", "developer", "user", "assistant", "tool"]]
    content: str | Sequence[Mapping[str, Any]] | None
    name: str
    tool_call_id: str
    tool_calls: Sequence[Mapping[str, Any]]


class Sampling(TypedDict, total=False):
    """How tokens are chosen, in chats and completions."""

    max_tokens: int
    temperature: float
    top_p: float
    n: int
    stop: str | Sequence[str]
    seed: int
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[str, float]
    stream_options: Mapping[str, bool]
    user: str
    top_k: int
    min_p: float
    repetition_penalty: float
    min_tokens: int
    ignore_eos: bool
    cache_salt: str
    structured_outputs: Mapping[str, Any]
    service_tier: Literal["auto", "default", "flex", "priority"]


class ChatMembers(Sampling, total=False):
    """Members of a chat next to `model` and `messages`."""

    max_completion_tokens: int
    logprobs: bool
    top_logprobs: int
    tools: Sequence[Mapping[str, Any]]
    tool_choice: str | Mapping[str, Any]
    parallel_tool_calls: bool
    response_format: Mapping[str, Any]
    reasoning_effort: str
    chat_template_kwargs: Mapping[str, Any]


class EmbeddingsMembers(TypedDict, total=False):
    """Members of an embeddings request next to `model` and `input`. The vectors of `base64` remain text."""

    dimensions: int
    encoding_format: Literal["float", "base64"]
    truncate_prompt_tokens: int
    user: str


class ChatBody(ChatMembers, total=False):
    """The body of `/chat/completions`."""

    model: Required[str]
    messages: Required[Sequence[Message]]


class CompletionBody(Sampling, total=False):
    """The body of `/completions`."""

    model: Required[str]
    prompt: Required[str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]]]
    logprobs: int
    echo: bool
    suffix: str


class EmbeddingsBody(EmbeddingsMembers, total=False):
    """The body of `/embeddings`: texts, or lists of tokens."""

    model: Required[str]
    input: Required[str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]]]


class RerankBody(TypedDict, total=False):
    """The body of `/v1/rerank`, `/v2/rerank` and `/rerank`."""

    model: Required[str]
    query: Required[str]
    documents: Required[Sequence[str]]
    top_n: int


class ScoreBody(TypedDict, total=False):
    """The body of `/v1/score` and `/score`: one text, or as many as in `text_2`."""

    model: Required[str]
    text_1: Required[str | Sequence[str]]
    text_2: Required[str | Sequence[str]]


class TokenizeBody(TypedDict, total=False):
    """The body of `/tokenize`: a prompt or messages."""

    model: Required[str]
    prompt: str
    messages: Sequence[Message]
    add_special_tokens: bool


class ResponsesBody(TypedDict, total=False):
    """The body of `/responses`."""

    model: Required[str]
    input: Required[str | Sequence[Mapping[str, Any]]]
    instructions: str
    max_output_tokens: int
    temperature: float
    top_p: float
    previous_response_id: str
    store: bool
    background: bool
    text: Mapping[str, Any]
    tools: Sequence[Mapping[str, Any]]
    tool_choice: str | Mapping[str, Any]
    reasoning: Mapping[str, Any]
    metadata: Mapping[str, str]


class MessagesBody(TypedDict, total=False):
    """The body of Anthropic's `/messages`."""

    model: Required[str]
    messages: Required[Sequence[Mapping[str, Any]]]
    max_tokens: Required[int]
    system: str | Sequence[Mapping[str, Any]]
    temperature: float
    top_p: float
    top_k: int
    stop_sequences: Sequence[str]
    tools: Sequence[Mapping[str, Any]]
    tool_choice: Mapping[str, Any]
    metadata: Mapping[str, str]
