"""Ready code for one request to an ingress: curl, Python, JavaScript, Java and the command line. Pure. The code reads
keys from the environment."""

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


LANGUAGES = ("curl", "Python", "JavaScript", "Java", "switchyard")
JAVA_ROLES = frozenset({"system", "user", "assistant"})
"""Roles for which the Java client has a method that takes a text."""


def snippets(url: str, request: Mapping[str, Any], *, has_key: bool) -> dict[str, str]:
    """Language -> code that sends this chat completion to the ingress at `url`, such as `http://10.0.0.1:8080`."""
    sources = (
        _curl(url, request, has_key=has_key),
        _python(url, request, has_key=has_key),
        _javascript(url, request, has_key=has_key),
        _java(url, request, has_key=has_key),
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


def _java(url: str, request: Mapping[str, Any], *, has_key: bool) -> str:
    messages = request["messages"]
    are_texts = all(
        set(one) == {"role", "content"} and one["role"] in JAVA_ROLES and isinstance(one["content"], str)
        for one in messages
    )
    calls = [f".{one['role']}({_java_literal(one['content'])})" for one in messages if are_texts]
    for name, value in request.items():
        if name not in {"model", "stream"} and not (are_texts and name == "messages"):
            calls.append(f".with({_java_literal(name)}, {_java_literal(value)})")
    chat = "".join(f"\n                    {call}" for call in calls)
    key = f'\n                .apiKey(System.getenv("{KEY_VARIABLE}"))' if has_key else ""
    return (
        "// make java-client writes the jar: java -cp switchyard-client.jar Ask.java\n"
        "import switchyard.client.*;\n\n"
        "public class Ask {\n"
        "    public static void main(String[] arguments) {\n"
        f"        try (var client = Switchyard.of({_java_literal(f'{url}/v1')}){key}.build();\n"
        f"                var events = client.streamChat(Chat.of({_java_literal(request['model'])}){chat})) {{\n"
        "            for (var event : events) {\n"
        "                System.out.print(event.text());\n"
        "            }\n"
        "        }\n"
        "    }\n"
        "}\n"
    )


def _java_literal(value: object) -> str:
    """Returns an expression for a JSON value. Texts have the same escapes in JSON and in Java."""
    if isinstance(value, bool | float) or (isinstance(value, int) and abs(value) < 2**31):
        return json.dumps(value)
    text = json.dumps(value, ensure_ascii=False)
    return text if isinstance(value, str) else f"Json.parse({json.dumps(text, ensure_ascii=False)})"


def _command_line(request: Mapping[str, Any]) -> str:
    last = next((one["content"] for one in reversed(request["messages"]) if one["role"] == "user"), "")
    text = last if isinstance(last, str) else " ".join(part["text"] for part in last if part.get("type") == "text")
    return f"switchyard chat {shlex.quote(request['model'])} {shlex.quote(text)}"
