"""Command lines, an evaluation, and plain HTTP. One function for each."""

import json
import tempfile
from pathlib import Path
from typing import Any

from cases import (
    BASE_URL,
    BEGINNING,
    KEY,
    MESSAGES,
    MODEL,
    QUESTION,
    ROOT_URL,
    beside_this_python,
    expect,
    features,
    run,
    variant,
)

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def llm() -> None:
    """`llm`, with the ingress in its file of further models."""
    home = tempfile.mkdtemp()
    models = [
        {
            "model_id": f"{kind}-{name}",
            "model_name": name,
            "api_base": BASE_URL,
            "api_key_name": "ours",
            "supports_schema": True,
            **more,
        }
        for name in (MODEL, "gpt-9")
        for kind, more in (("chat", {}), ("plain", {"completion": True}))
    ]
    Path(home, "extra-openai-models.yaml").write_text(json.dumps(models))  # JSON is YAML

    def ask(*options: str, model: str = MODEL, key: str = KEY, kind: str = "chat", text: str = QUESTION) -> str:
        command = (beside_this_python("llm"), "-m", f"{kind}-{model}", "--key", key, "-o", "max_tokens", "64", *options)
        return run(*command, text, LLM_USER_PATH=home)

    features(
        chat=lambda: ask("--no-stream"),
        stream=ask,
        completions=lambda: ask(kind="plain", text=BEGINNING),
        structured=lambda: ask("--schema", json.dumps(SCHEMA)),
        errors=lambda model, key: ask(model=model, key=key),
    )


def inspect_ai() -> None:
    """An evaluation of two samples by Inspect."""
    from inspect_ai import Task, eval
    from inspect_ai.dataset import Sample
    from inspect_ai.model import GenerateConfig, get_model
    from inspect_ai.scorer import includes

    samples = [Sample(QUESTION, target="Paris"), Sample("And of Spain?", target="Madrid")]

    def evaluate(model: str = MODEL, key: str = KEY) -> tuple[Any, list[str]]:
        config = GenerateConfig(max_tokens=16, max_retries=0, timeout=120)
        ours = get_model(f"openai-api/ours/{model}", base_url=BASE_URL, api_key=key, config=config, memoize=False)
        with tempfile.TemporaryDirectory() as folder:
            log = eval(Task(samples, scorer=includes()), ours, display="none", log_dir=folder)[0]
            return log, [sample.output.completion for sample in log.samples or ()]

    def chat() -> str:
        log, said = evaluate()
        expect(log.status == "success" and len(said) == 2, log.error)
        return said[0]

    def fail(model: str, key: str) -> None:
        log, _ = evaluate(model, key)
        raise RuntimeError(log.error.message)

    features(chat=chat, errors=fail)


def curl() -> None:
    def ask(path: str, body: Any = None, key: str = KEY) -> Any:
        sent = ("-d", json.dumps(body), "-H", "Content-Type: application/json") if body else ()
        return run("curl", "-sSN", "--max-time", "120", "-H", f"Authorization: Bearer {key}", *sent, ROOT_URL + path)

    def asked(path: str, **body: Any) -> Any:
        return json.loads(ask(path, {"model": MODEL, **body}))

    def stream() -> str:
        said = ask("/v1/chat/completions", {"model": MODEL, "messages": MESSAGES, "max_tokens": 8, "stream": True})
        lines = [line.removeprefix("data: ") for line in said.splitlines() if line]
        expect(lines.pop() == "[DONE]", said)
        return "".join(_text(json.loads(line)) for line in lines)

    def tokenize() -> str:
        text = asked("/detokenize", tokens=asked("/tokenize", prompt=BEGINNING)["tokens"])["prompt"]
        expect(text == BEGINNING, text)
        return text

    def fail(model: str, key: str) -> None:
        said = json.loads(ask("/v1/chat/completions", {"model": model, "messages": MESSAGES}, key))["error"]
        status = {"model_not_found": 404, "invalid_api_key": 401}[said["code"]]
        raise RuntimeError(f"{status} {said['message']}")

    features(
        models=lambda: json.loads(ask(f"/v1/models/{MODEL}"))["id"],
        chat=lambda: asked("/v1/chat/completions", messages=MESSAGES, max_tokens=8)["choices"][0]["message"]["content"],
        stream=stream,
        completions=lambda: asked("/v1/completions", prompt=BEGINNING, max_tokens=8)["choices"][0]["text"],
        tokenize=tokenize,
        embeddings=lambda: [one["embedding"] for one in asked("/v1/embeddings", input=["one", "two"])["data"]],
        errors=fail,
    )


def _text(chunk: Any) -> str:
    return (chunk["choices"][0]["delta"].get("content") or "") if chunk["choices"] else ""


variant({"curl": curl, "inspect_ai": inspect_ai, "llm": llm})
