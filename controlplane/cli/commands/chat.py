"""Chats with a deployment through its ingress, as applications do, and prints latencies and the cell that answered."""

import sys
import time
from typing import Annotated, Any

import typer

from controlplane.chat_stream import KEY_VARIABLE, ChatStreamParser, error_message
from controlplane.cli.completion import names_of
from controlplane.cli.errors import Failure
from controlplane.cli.exit_codes import ExitCode
from controlplane.cli.session import Session, path_of, session_of

app = typer.Typer()

CELL, REGION = "X-Switchyard-Cell", "X-Switchyard-Region"


@app.command()
def chat(
    context: typer.Context,
    deployment: Annotated[str, typer.Argument(autocompletion=names_of("deployments"))],
    prompt: Annotated[str, typer.Argument(help="Prompt. Default: standard input, or a dialog in a terminal.")] = "",
    region: Annotated[str, typer.Option("--region", "-r", autocompletion=names_of("regions"))] = "",
    max_tokens: Annotated[int, typer.Option(min=1)] = 256,
    temperature: Annotated[float | None, typer.Option(min=0, max=2)] = None,
    key: Annotated[str, typer.Option(help=f"Application key. Default: {KEY_VARIABLE}.")] = "",
) -> None:
    """Chat with a deployment. Shows time to first token, tokens per second, and the region and cell that answered.

    switchyard chat smollm2 "What is the capital of France?"
    """
    run = session_of(context)
    url = ingress_of(run, deployment, region)
    options: dict[str, Any] = {"model": deployment, "max_tokens": max_tokens, "stream": True}
    options["stream_options"] = {"include_usage": True}
    if temperature is not None:
        options["temperature"] = temperature
    shown_key = key or run.environ.get(KEY_VARIABLE, "")
    messages: list[dict[str, str]] = []
    while text := prompt or _next_prompt(run, first=not messages):
        messages.append({"role": "user", "content": text})
        answer = _complete(run, url, {**options, "messages": messages}, shown_key)
        messages.append({"role": "assistant", "content": answer})
        if prompt or not run.is_interactive:
            return


def ingress_of(run: Session, deployment: str, region: str) -> str:
    """The address of the ingress in the named region, else in the region with the most ready cells. Raises Failure if
    the region has none."""
    if not region:
        places = run.connection.get(path_of("deployments", deployment))["regions"]
        if not places:
            raise Failure(f"{deployment} has no region; name one with --region", ExitCode.CONFLICT)
        region = max(places, key=lambda place: place["ready"])["region"]
    url = run.connection.get(path_of("regions", region))["ingress_url"]
    if not url:
        raise Failure(f"{region} has no ingress", ExitCode.CONFLICT)
    return str(url).rstrip("/")


def _next_prompt(run: Session, *, first: bool) -> str:
    if not run.is_interactive:
        return sys.stdin.read().strip() if first else ""
    sys.stderr.write("> ")
    sys.stderr.flush()
    return sys.stdin.readline().strip()


def _complete(run: Session, url: str, body: dict[str, Any], key: str) -> str:
    """Stream the answer; returns its text. Raises Failure if there is no response, or it is an error."""
    import httpx

    headers = {"Authorization": f"Bearer {key}"} if key else {}
    reader, pieces = ChatStreamParser(time.monotonic()), list[str]()
    try:
        with httpx.stream(
            "POST", f"{url}/v1/chat/completions", json=body, headers=headers, timeout=run.timeout_s, trust_env=False
        ) as response:
            if not response.is_success:
                raise _refused(response)
            for chunk in response.iter_bytes():
                for piece in reader.feed(chunk, time.monotonic()):
                    pieces.append(piece)
                    if not run.output.is_for_programs:
                        run.output.out.write(piece)
                        run.output.out.flush()
            where = {"cell": response.headers.get(CELL), "region": response.headers.get(REGION)}
    except httpx.TimeoutException:
        raise Failure(f"{url} did not answer in time (--timeout)", ExitCode.TIMED_OUT) from None
    except httpx.TransportError as error:
        raise Failure(f"cannot reach the ingress {url}: {error}", ExitCode.UNREACHABLE) from None
    text = "".join(pieces)
    _print_figures(run, text, {**where, **reader.figures()})
    if reader.error:
        raise Failure(f"the answer was interrupted: {reader.error}", ExitCode.SERVER_FAULT)
    return text


def _refused(response: Any) -> Failure:
    response.read()
    try:
        message = error_message(response.json())
    except ValueError:
        message = response.text[:200]
    codes = {401: ExitCode.NOT_ALLOWED, 403: ExitCode.NOT_ALLOWED, 404: ExitCode.NOT_FOUND, 503: ExitCode.CONFLICT}
    code = codes.get(response.status_code, ExitCode.SERVER_FAULT)
    return Failure(f"the ingress answered {response.status_code}: {message}", code)


def _print_figures(run: Session, text: str, figures: dict[str, Any]) -> None:
    if run.output.is_for_programs:
        run.output.document({"text": text, **figures})
        return
    run.output.plain("")
    rate = f", {figures['tokens_per_s']} tokens/s" if figures["tokens_per_s"] else ""
    first = f"first token after {figures['ttft_ms']:.0f} ms" if figures["ttft_ms"] is not None else "no token"
    where = f"{figures['cell'] or 'unknown cell'} in {figures['region'] or 'unknown region'}"
    run.output.note(f"{where}: {first}, {figures['tokens']} tokens{rate}")
