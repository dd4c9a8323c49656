"""What a client asks to be generated, in the one form that all families of paths share. Pure data."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from engine_agent.engines.sim.text.vocabulary import count_tokens, prompt_text, split_tokens


@dataclass(frozen=True)
class Prompt:
    """One prompt: the texts to be read in turn, of which `answered` is to be answered. `ids` if it came as token ids.

    `follows_tool`: what is to be answered is the result of a tool.
    """

    texts: tuple[str, ...]
    answered: str
    ids: tuple[int, ...] | None = None
    follows_tool: bool = False

    @classmethod
    def of_text(cls, text: str) -> "Prompt":
        return cls((text,), text)

    @classmethod
    def of_ids(cls, ids: Sequence[int]) -> "Prompt":
        """A prompt that came as token ids."""
        text = prompt_text(ids)
        return cls((text,), text, tuple(ids))

    @cached_property
    def tokens(self) -> int:
        return len(self.ids) if self.ids is not None else sum(map(count_tokens, self.texts))

    @property
    def context(self) -> str:
        return " ".join(self.texts)

    def token_texts(self) -> tuple[str, ...]:
        if self.ids is not None:
            return tuple(
                prompt_text((one,)) if index == 0 else f" {prompt_text((one,))}" for index, one in enumerate(self.ids)
            )
        return tuple(token for text in self.texts for token in split_tokens(text))


@dataclass(frozen=True)
class Tool:
    """A function that the model may call; `parameters` is the JSON schema of its arguments."""

    name: str
    description: str = ""
    parameters: Any = None


@dataclass(frozen=True)
class ToolChoice:
    """Whether tools are called: `name` is the one that must be, `parallel` allows several in one answer."""

    kind: Literal["none", "auto", "required", "named"] = "none"
    name: str = ""
    parallel: bool = True


@dataclass(frozen=True)
class OutputForm:
    """What the text of an answer must be: `json` a document that satisfies the schema `rule`, `choice` one of the texts
    in `rule`, `regex` a text that matches `rule`. `param` names the field that says so."""

    kind: Literal["json", "choice", "regex"]
    rule: Any
    param: str


@dataclass(frozen=True)
class Stops:
    """What ends an answer before its natural end, and whether it stays in the text."""

    texts: tuple[str, ...] = ()
    ids: frozenset[int] = frozenset()
    is_included: bool = False


@dataclass(frozen=True)
class Source:
    """Where a prompt of `tokens` lies that another engine has read: its request's id there, and where to ask."""

    request_id: str
    host: str
    port: int
    tokens: int


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """One request. `choices` answers to each of `prompts`; `output_limit` None: as long as the answer naturally is, and
    `limit_param` names the field that says otherwise. `include_usage`: the last event of a
    stream has the token counts. `top_logprobs` None: no log probabilities.
    """

    model: str
    prompts: tuple[Prompt, ...]
    choices: int = 1
    output_limit: int | None = None
    limit_param: str = "max_tokens"
    min_tokens: int = 0
    exact_length: bool = False
    seed: int = 0
    priority: int = 0
    stops: Stops = Stops()
    form: OutputForm | None = None
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = ToolChoice()
    stream: bool = False
    include_usage: bool = False
    top_logprobs: int | None = None
    is_handed_over: bool = False
    """Another engine takes its prompt from here once it is answered."""
    source: Source | None = None
    """Where its prompt lies, if another engine has read it."""

    @property
    def prompt(self) -> Prompt:
        """The only prompt, of all but completions."""
        return self.prompts[0]
