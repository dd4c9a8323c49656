"""Both clients, by one table of cases, against regions on real sockets (`tests/client/cases.py`)."""

import asyncio
import json
import math
import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

import switchyard_client
from controlplane.chat_stream import KEY_VARIABLE
from controlplane.dashboard.snippets import snippets
from fleet.webhooks.planner import signature
from switchyard_client import ApiError, AsyncSwitchyard, Pending, Retries, SwitchyardError
from tests.client.cases import ACCEPTED, CASES, DONE, delta, said
from tests.client.scripted import ScriptedRegions, scripted_regions
from tests.controlplane.embedded.processes import eventually

pytestmark = [pytest.mark.processes, pytest.mark.slow]
LINT = (
    "-Xlint:cast,deprecation,divzero,empty,fallthrough,finally,overrides,rawtypes,removal,static,try,unchecked,varargs"
)
"""Warnings that each JDK since 17 knows; a newer one has more, which are no errors."""
JAVA = Path(__file__).resolve().parents[2] / "client/java"
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
CALLBACK = b'{"data":{"id":"ar_1","status":"done"}}'
SNIPPETS: dict[str, dict[str, Any]] = {
    "Quotes": {
        "model": "m",
        "messages": [
            {"role": "system", "content": "Say 'hi' to \"Ada\""},
            {"role": "user", "content": "$(reboot) \\u0022 \\ \n \x01 ${x} </script> é 🚂 \u2028 /* */ //"},
        ],
        "stream": True,
        "max_tokens": 5,
        "temperature": 0.5,
        "seed": 2**40,
        "stop": ["a\nb"],
        "logprobs": False,
    },
    "Parts": {
        "model": "m",
        "messages": [{"role": "user", "content": [{"type": "text", "text": 'a "quoted" \\ text'}]}],
        "stream": True,
        "response_format": {"type": "json_object"},
    },
}
"""Requests whose code of the console is compiled and run, by the name of its class."""
HANGS = {"stream": [delta("one")], "then": "hang"}
LIVES: dict[str, list[dict[str, Any]]] = {
    "cancelled": [HANGS], "interrupted": [HANGS], "closed": [HANGS], "polling": [{"json": ACCEPTED}],
    "shared": [said("hello")], "demand": [{"stream": [delta("one"), delta("two"), delta("three")], "then": "hang"}],
}  # fmt: skip
"""Scripts of calls that end early (`Lives.java`)."""
PROXIES = ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "ALL_PROXY", "all_proxy")


@pytest.fixture(scope="module")
def regions(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedRegions]:
    scripts = {name: case["regions"] for name, case in CASES.items()}
    scripts |= {name: {"east": [{"stream": [delta("hello"), DONE]}]} for name in SNIPPETS}
    scripts |= {name: {"east": script} for name, script in LIVES.items()}
    with scripted_regions(scripts, tmp_path_factory.mktemp("regions")) as running:
        yield running


@pytest.fixture(scope="module")
def java(regions: ScriptedRegions, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The results of all cases: one compiler and one machine for all of them."""
    assert shutil.which("javac"), (
        "there is no javac on PATH, and these tests need one: apt-get install openjdk-17-jdk-headless"
    )
    classes = tmp_path_factory.mktemp("classes")
    for name, request in SNIPPETS.items():
        code = snippets(f"{regions.url('east')}/java-code-{name}", request, has_key=True)["Java"]
        (classes / f"{name}.java").write_text(code.replace("class Ask", f"class {name}"))
    sources = sorted(str(file) for folder in (JAVA, classes) for file in folder.rglob("*.java"))
    light = ("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Xshare:auto")
    strict = ("--release", "17", "-encoding", "UTF-8", LINT, "-Werror")
    compiler = ["javac", *(f"-J{option}" for option in light), *strict, "-d", str(classes), *sources]
    subprocess.run(compiler, check=True, timeout=240)
    document = {
        "urls": {name: regions.url(name) for name in ("east", "west", "away", "secure")},
        "ca_file": str(regions.ca_file),
        "snippets": list(SNIPPETS),
        "cases": [
            {"name": name, "order": list(case["regions"]), "calls": case["calls"], "options": case["options"]}
            for name, case in CASES.items()
        ],
    }
    away = regions.url("away").rpartition(":")[2]
    proxy = ["-Dhttp.nonProxyHosts=", *(f"-D{kind}.proxy{what}" for kind in ("http", "https")
             for what in ("Host=127.0.0.1", f"Port={away}"))]  # fmt: skip
    signed = f"-Dcallback.signature={signature('whs', 1_800_000_000, CALLBACK)}"
    done = subprocess.run(
        ["java", *light, "-Xmx256m", *proxy, signed, "-cp", classes, "switchyard.client.Cases"],
        input=json.dumps(document), env={**os.environ, KEY_VARIABLE: "sw_1"}, capture_output=True, text=True,
        timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    results: dict[str, Any] = json.loads(done.stdout)
    return results


@pytest.fixture(scope="module")
def python(regions: ScriptedRegions) -> dict[str, list[dict[str, Any]]]:
    """The results of all cases, with proxies in the environment that do not exist."""

    async def run() -> dict[str, list[dict[str, Any]]]:
        results = await asyncio.gather(*(results_of(name, regions) for name in CASES))
        return dict(zip(CASES, results, strict=True))

    with pytest.MonkeyPatch.context() as environment:
        for name in PROXIES:
            environment.setenv(name, regions.url("away"))
        environment.setenv("NO_PROXY", "")
        environment.setenv("no_proxy", "")
        return asyncio.run(asyncio.wait_for(run(), 120))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_the_java_client_behaves_as_the_table_says(
    name: str, mode: str, java: dict[str, Any], regions: ScriptedRegions
) -> None:
    check(name, f"java-{mode}", java[f"{mode}/{name}"], regions)


@pytest.mark.parametrize("name", CASES)
def test_the_python_client_behaves_as_the_table_says(
    name: str, python: dict[str, list[dict[str, Any]]], regions: ScriptedRegions
) -> None:
    check(name, "python-async", python[name], regions)


def check(name: str, client: str, results: list[dict[str, Any]], regions: ScriptedRegions) -> None:
    case, seen = CASES[name], regions.seen[f"{client}-{name}"]
    assert [
        {member: result.get(member, "absent") for member in expected}
        for result, expected in zip(results, case["results"], strict=True)
    ] == case["results"], results
    assert all(
        "error" in expected or "error" not in got for got, expected in zip(results, case["results"], strict=True)
    )
    if case["hosts"] is not None:
        assert seen.hosts == case["hosts"]
    for region in case.get("closed", ()):
        assert eventually(lambda region=region: region in seen.closed), f"the connection to {region} is still open"  # type: ignore[misc]
    first = seen.requests[0] if seen.requests else {"headers": {}}
    assert case.get("headers", {}).items() <= first["headers"].items()
    assert [request["path"] for request in seen.requests] == case.get("paths", [each["path"] for each in seen.requests])
    if "deadline_ms" in case:
        sent = [int(request["headers"]["x-switchyard-deadline-ms"]) for request in seen.requests]
        least, most = case["deadline_ms"]
        assert least <= sent[-1] <= sent[0] <= most
    if case.get("same_key"):
        one, two = (request["headers"]["idempotency-key"] for request in seen.requests[:2])
        assert one == two
    if "body" in case:
        assert first["body"] == case["body"]
    if "last_body" in case:
        assert seen.requests[-1]["body"] == case["last_body"]
    if case.get("body_stream"):
        assert first["body"] == CHAT | {"stream": True}


async def results_of(name: str, regions: ScriptedRegions) -> list[dict[str, Any]]:
    case = CASES[name]
    options = dict(case["options"])
    options["retries"] = Retries(**options["retries"])
    if "trace" in options:
        options["trace"] = lambda trace=options["trace"]: {"traceparent": trace}
    if "ca_file" in options:
        options["ca_file"] = str(regions.ca_file)
    urls = [f"{regions.url(region)}/python-async-{name}/v1" for region in case["regions"]]
    results = []
    async with AsyncSwitchyard(urls, **options) as client:
        for call in case["calls"]:
            result: dict[str, Any] = {}
            try:
                await ask(client, call, result)
            except ApiError as error:
                result |= {"error": "ApiError", "status": error.status, "code": error.code, "said": str(error)}
                result["request_id"] = error.request_id
            except SwitchyardError as error:
                result["error"] = type(error).__name__
            results.append(result)
    return results


async def ask(client: AsyncSwitchyard, call: dict[str, Any], result: dict[str, Any]) -> None:
    path, body = call.get("path", "/chat/completions"), call.get("body", CHAT)
    options = {name: call[name] for name in ("deadline_s", "headers", "resumes") if name in call}
    match call["do"]:
        case "post":
            result |= answered(await client.post(path, body, **options))
        case "get":
            result |= answered(await client.get(path))
        case "stream":
            result["texts"] = []
            async with client.stream(path, body, **options) as events:
                await read(events, result["texts"], call.get("take"))
        case "models":
            result["models"] = await client.models()
        case "embeddings":
            result["vectors"] = (await client.embeddings("m", ["one", "two"], dimensions=2)).embeddings
        case "submit":
            result |= pending(
                await client.submit(path, body, deadline_s=60, callback_url="https://app/done", sink="s3")
            )
        case "wait":
            result |= pending(await client.wait(call["id"], timeout_s=call["timeout_s"], poll_s=0.02))
        case "retrieve":
            result |= pending(await client.retrieve(call["id"]))
        case "cancel":
            result |= pending(await client.cancel(call["id"]))


async def read(events: AsyncIterator[Any], texts: list[str], take: int | None) -> None:
    async for event in events:
        texts.append(event.text)
        if len(texts) == take:
            return


def answered(answer: switchyard_client.Answer) -> dict[str, Any]:
    usage = answer.usage
    budgets = {kind: [one.limit, one.remaining, one.reset_s] for kind, one in answer.budgets.items()}
    counted = [usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens] if usage else None
    return {"text": answer.text, "attempts": answer.attempts, "usage": counted, "region": answer.region, **budgets}


def pending(request: Pending) -> dict[str, Any]:
    text = request.answer.text if request.answer else None
    return {"id": request.id, "status": request.status, "secret": request.callback_secret, "text": text}


def test_calls_of_the_java_client_end_with_their_future_thread_subscriber_or_client(
    java: dict[str, Any], regions: ScriptedRegions
) -> None:
    assert java["lives"] == {
        "cancelled": "CancellationException",
        "interrupted": ["CancellationException", True],
        "closed": ["CancellationException", "IllegalStateException"],
        "polling": "CancellationException",
        "shared": ["hello"] * 16,
        "demand": ["one", "two"],
    }
    for script in ("cancelled", "interrupted", "closed", "demand"):
        seen = regions.seen[f"java-life-{script}"]
        assert eventually(lambda seen=seen: seen.closed != []), script  # type: ignore[misc]


@pytest.mark.parametrize("name", SNIPPETS)
def test_the_java_code_of_the_console_sends_the_request(
    name: str, java: dict[str, Any], regions: ScriptedRegions
) -> None:
    assert java["snippets"] == ["hello"] * len(SNIPPETS)
    (sent,) = regions.seen[f"java-code-{name}"].requests
    assert sent["body"] == SNIPPETS[name]
    assert sent["headers"]["authorization"] == "Bearer sw_1"


def test_json_of_the_java_client_is_strict_and_bounded(java: dict[str, Any]) -> None:
    units = java["units"]
    values = units["json_values"]
    assert values["a"] == [1, -2500.0, True, False, None, "é\n🚂"]
    assert (values["big"], values["empty"], values["none"]) == (123456789012345678901234567890, {}, [])
    assert units["json_refused"] == [], "these were accepted"
    assert units["json_round_trip"] == 0


def test_parts_of_the_java_client_decide_as_those_of_the_python_client(java: dict[str, Any]) -> None:
    units = java["units"]
    assert units["events"] == 0
    assert units["resumption"] == 0, "texts differ after a repeat"
    assert units["callbacks"] == ["ar_1", *["refused"] * 8]
    assert units["failover"] == {
        "order": [[1, 2, 0], [0, 1, 2]],
        "rests": [[1, 0], [0, 1]] * 3,
        "decided": [[1, 0], None, [0, 2], None, None],
    }


def test_bodies_of_the_java_client_have_the_members_of_the_api(java: dict[str, Any]) -> None:
    chat, completion, embeddings, rerank = java["units"]["bodies"]
    assert chat["messages"] == [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    assert chat["tools"] == [
        {"type": "function", "function": {"name": "f", "description": "does", "parameters": {"type": "object"}}}
    ]
    assert (chat["max_tokens"], chat["stop"], chat["top_k"], "seed" in chat) == (3, ["a", "b"], 4, False)
    assert chat["service_tier"] == "flex"
    assert chat["stream_options"] == {"include_usage": True}
    assert math.isclose(chat["temperature"], 0.5)
    assert completion == {"model": "m", "prompt": "p", "n": 2}
    assert embeddings == {"model": "m", "input": ["x"], "dimensions": 8}
    assert rerank == {"model": "m", "query": "q", "documents": ["d"], "top_n": 1}
