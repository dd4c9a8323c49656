"""Code that sends a request: each language's own parser accepts it, whatever the message contains."""

import ast
import json
import shlex
from typing import Any

import pytest

from controlplane.dashboard.snippets import snippets

ODD = ["Say 'hi' to \"Ada\"", "$(reboot) `id` \\ \n second line", "${process.env.HOME} </script> é 🚂"]


def request(text: str, **others: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": text}], "stream": True, **others}


@pytest.mark.parametrize("text", ODD)
def test_the_shell_passes_the_body_unchanged(text: str) -> None:
    words = shlex.split(snippets("http://h:1", request(text), has_key=False)["curl"].replace("\\\n", ""))
    assert json.loads(words[words.index("-d") + 1]) == request(text)
    assert words[2] == "http://h:1/v1/chat/completions"
    assert shlex.split(snippets("http://h:1", request(text), has_key=False)["switchyard"])[-1] == text


@pytest.mark.parametrize("text", ODD)
def test_python_calls_the_openai_package_with_unknown_members_as_its_extra_body(text: str) -> None:
    tree = ast.parse(snippets("http://h:1", request(text, top_p=0.5, top_k=3), has_key=True)["Python"])
    call = next(node for node in ast.walk(tree) if isinstance(node, ast.Call) and len(node.keywords) > 2)
    given = {one.arg: ast.literal_eval(one.value) for one in call.keywords}
    assert given == request(text, top_p=0.5) | {"extra_body": {"top_k": 3}}


@pytest.mark.parametrize("text", ODD)
def test_javascript_has_the_body_as_a_literal(text: str) -> None:
    source = snippets("http://h:1", request(text), has_key=True)["JavaScript"]
    literal = source.partition("JSON.stringify(")[2].partition("),\n});")[0]
    assert json.loads(literal) == request(text) | {"stream": False}


def test_a_message_with_an_image_is_code_in_every_language() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,BASE64_OF_YOUR_IMAGE"}}
    sent = request("") | {"messages": [{"role": "user", "content": [{"type": "text", "text": "it's?"}, image]}]}
    code = snippets("http://h:1", sent, has_key=False)
    assert shlex.split(code["switchyard"])[-1] == "it's?"
    assert all("BASE64_OF_YOUR_IMAGE" in code[language] for language in ("curl", "Python", "JavaScript", "Java"))


def test_the_key_is_read_from_the_environment_only_where_one_is_needed() -> None:
    with_key, without = (snippets("http://h:1", request("x"), has_key=each) for each in (True, False))
    for language in ("curl", "Python", "JavaScript", "Java"):
        assert "SWITCHYARD_KEY" in with_key[language]
        assert "SWITCHYARD_KEY" not in without[language]
