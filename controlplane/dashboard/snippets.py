"""Ready code for one request to an ingress: curl, Python, JavaScript and the command line. Pure. Keys are never part of
it: the code reads them from the environment."""

import json
import shlex
from collections.abc import Mapping
from pprint import pformat
from typing import Any

from controlplane.chat_stream import KEY_VARIABLE

OPENAI_ARGUMENTS = frozenset({
    "model", "messages", "max_tokens", "temperature", "top_p", "stop", "seed", "n", "tools", "tool_choice",
    "presence_penalty", "frequency_penalty", "response_format", "logprobs", "top_logprobs", "stream",
})  # fmt: skip
"""Arguments of the `openai` package's `create`; it takes others as `extra_body`."""


LANGUAGES = ("curl", "Python", "JavaScript", "switchyard")


def snippets(url: str, request: Mapping[str, Any], *, has_key: bool) -> dict[str, str]:
    """Language -> code that sends this chat completion to the ingress at `url`, such as `http://10.0.0.1:8080`."""
    sources = (
        _curl(url, request, has_key=has_key),
        _python(url, request, has_key=has_key),
        _javascript(url, request, has_key=has_key),
        _command_line(request),
    )
    return dict(zip(LANGUAGES, sources, strict=True))


def _curl(url: str, request: Mapping[str, Any], *, has_key: bool) -> str:
    lines = [f"curl -N {shlex.quote(f'{url}/v1/chat/completions')}", "-H 'Content-Type: application/json'"]
    if has_key:
        lines.append(f'-H "Authorization: Bearer ${KEY_VARIABLE}"')
    lines.append(f"-d {shlex.quote(json.dumps(request, ensure_ascii=False))}")
    return " \\\n  ".join(lines)


def _python(url: str, request: Mapping[str, Any], *, has_key: bool) -> str:
    arguments = {name: value for name, value in request.items() if name in OPENAI_ARGUMENTS}
    if extra := {name: value for name, value in request.items() if name not in OPENAI_ARGUMENTS}:
        arguments["extra_body"] = extra
    key = f'os.environ["{KEY_VARIABLE}"]' if has_key else '"unused"'
    given = "".join(f"    {name}={_indented(value)},\n" for name, value in arguments.items())
    return (
        ("import os\n\n" if has_key else "")
        + "from openai import OpenAI\n\n"
        + f"client = OpenAI(base_url={f'{url}/v1'!r}, api_key={key})\n"
        + f"stream = client.chat.completions.create(\n{given})\n"
        + "for chunk in stream:\n"
        + "    if chunk.choices:\n"
        + '        print(chunk.choices[0].delta.content or "", end="", flush=True)\n'
    )


def _indented(value: object) -> str:
    return pformat(value, width=100, sort_dicts=False).replace("\n", "\n    ")


def _javascript(url: str, request: Mapping[str, Any], *, has_key: bool) -> str:
    body = json.dumps(dict(request) | {"stream": False}, indent=2, ensure_ascii=False).replace("\n", "\n  ")
    key = f", Authorization: `Bearer ${{process.env.{KEY_VARIABLE}}}`" if has_key else ""
    return (
        f"const response = await fetch({json.dumps(f'{url}/v1/chat/completions')}, {{\n"
        '  method: "POST",\n'
        f'  headers: {{ "Content-Type": "application/json"{key} }},\n'
        f"  body: JSON.stringify({body}),\n"
        "});\n"
        "console.log((await response.json()).choices[0].message.content);\n"
    )


def _command_line(request: Mapping[str, Any]) -> str:
    texts = [one["content"] for one in request["messages"] if one["role"] == "user"]
    return f"switchyard chat {shlex.quote(request['model'])} {shlex.quote(texts[-1])}"
