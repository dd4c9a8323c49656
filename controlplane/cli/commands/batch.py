"""Batches through an ingress, with an application's key: submit a file, follow, cancel, fetch results."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from controlplane.chat_stream import KEY_VARIABLE, error_message
from controlplane.cli.commands.act import Yes
from controlplane.cli.commands.chat import ingress_of
from controlplane.cli.errors import Failure
from controlplane.cli.exit_codes import ExitCode, exit_code_of
from controlplane.cli.session import Session, session_of

if TYPE_CHECKING:
    import httpx

app = typer.Typer()
batch = typer.Typer(help="Run batches with an application's key. Batches of all tenants: switchyard get batches.",
                    no_args_is_help=True)  # fmt: skip
app.add_typer(batch, name="batch")

LOOK_EVERY_S = 2.0
UPLOAD_WITHIN_S = 600.0
ENDED = frozenset({"completed", "failed", "expired", "cancelled"})
Region = Annotated[str, typer.Option("--region", "-r", help="Region whose ingress is used. Default: the first region.")]
Key = Annotated[str, typer.Option(help=f"Application key. Default: {KEY_VARIABLE}.")]
Name = Annotated[str, typer.Argument(help="ID of the batch: batch_…")]


@batch.command()
def submit(
    context: typer.Context,
    file: Annotated[str, typer.Argument(help="JSON lines in the format of OpenAI's Batch API, or s3://bucket/key.")],
    endpoint: Annotated[str, typer.Option(help="The `url` of every line.")] = "/v1/chat/completions",
    window: Annotated[str, typer.Option(help="Time limit: 30m, 4h, 2d.")] = "24h",
    priority: Annotated[int, typer.Option(min=0, max=9)] = 5,
    output: Annotated[
        str, typer.Option("--output-uri", help="Second destination of results: s3://bucket/prefix.")
    ] = "",
    sink: Annotated[list[str] | None, typer.Option(help="Sink that gets the results; may be repeated.")] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until it has ended.")] = False,
    region: Region = "",
    key: Key = "",
) -> None:
    """Upload a file and start a batch of its lines, or of those of an object in S3.

    switchyard batch submit requests.jsonl --window 4h --wait"""
    run = session_of(context)
    ours: dict[str, Any] = {"completion_window": window, "priority": priority}
    ours |= {"output_uri": output} if output else {}
    ours |= {"sinks": sink} if sink else {}
    body: dict[str, Any] = {"endpoint": endpoint, "completion_window": "24h", "switchyard": ours}
    with _ingress_connection(run, region, key) as client:
        if file.startswith("s3://"):
            ours["input_uri"] = file
        else:
            body["input_file_id"] = _uploaded(run, client, Path(file))
        begun = _answer(run, client, "POST", "/v1/batches", json=body)
        if wait:
            begun = _watch(run, client, begun["id"])
    _show(run, begun)


@batch.command()
def status(
    context: typer.Context,
    name: Name,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until it has ended.")] = False,
    region: Region = "",
    key: Key = "",
) -> None:
    """Show the progress of a batch, its rate, and its estimated end.

    switchyard batch status batch_…"""
    run = session_of(context)
    with _ingress_connection(run, region, key) as client:
        found = _watch(run, client, name) if wait else _answer(run, client, "GET", f"/v1/batches/{name}")
    _show(run, found)


@batch.command()
def cancel(context: typer.Context, name: Name, yes: Yes = False, region: Region = "", key: Key = "") -> None:
    """Cancel a batch. Answered lines can be fetched.

    switchyard batch cancel batch_…"""
    run = session_of(context)
    run.confirm(f"No further lines of {name} will be sent.", wanted=name, yes=yes)
    with _ingress_connection(run, region, key) as client:
        ended = _answer(run, client, "POST", f"/v1/batches/{name}/cancel")
    _show(run, ended)


@batch.command()
def results(
    context: typer.Context,
    name: Name,
    to: Annotated[
        Path | None, typer.Option("--to", help="Output file, which must not exist. Default: standard output.")
    ] = None,
    errors: Annotated[bool, typer.Option("--errors", help="Fetch failed lines instead of answered ones.")] = False,
    region: Region = "",
    key: Key = "",
) -> None:
    """Fetch the results of a batch that has ended, one per line, in any order.

    switchyard batch results batch_… --to answers.jsonl"""
    run = session_of(context)
    with _ingress_connection(run, region, key) as client:
        found = _answer(run, client, "GET", f"/v1/batches/{name}")
        file = found["error_file_id" if errors else "output_file_id"]
        if file is None:
            kind = "failed" if errors else "was answered"
            raise Failure(f"{name} is {found['status']}, and none of its lines {kind}", ExitCode.CONFLICT)
        _fetch(run, client, f"/v1/files/{file}/content", to)


def _uploaded(run: Session, client: "httpx.Client", file: Path) -> str:
    try:
        with file.open("rb") as content:
            form = {"files": {"file": (file.name, content)}, "data": {"purpose": "batch"}}
            return str(_answer(run, client, "POST", "/v1/files", **form)["id"])
    except OSError as error:
        raise Failure(f"{file} cannot be read: {error.strerror or error}", ExitCode.USAGE) from error


def _watch(run: Session, client: "httpx.Client", name: str) -> dict[str, Any]:
    shown = ""
    while True:
        found = _answer(run, client, "GET", f"/v1/batches/{name}")
        if found["status"] in ENDED:
            return found
        if not run.output.is_for_programs and (line := progress_line(found)) != shown:
            shown = line
            run.output.note(line)
        time.sleep(LOOK_EVERY_S)


def progress_line(found: Mapping[str, Any]) -> str:
    """Progress, rate and estimated end, from the API's batch."""
    counts, ours = found["request_counts"], found["switchyard"]
    done = counts["completed"] + counts["failed"]
    if not counts["total"]:
        validated = ours.get("validated_lines")
        return f"{found['status']}: {validated:,} lines are validated" if validated else str(found["status"])
    percent = 100 * done // counts["total"]
    line = f"{found['status']}: {done:,} of {counts['total']:,} lines ({percent} %), {counts['failed']:,} failed"
    if ours["lines_per_s"]:
        line += f", {ours['lines_per_s']:.3g} lines/s"
    if ours["estimated_end_at"]:
        line += f", estimated end {_moment(ours['estimated_end_at'])}"
    return line


def _show(run: Session, found: dict[str, Any]) -> None:
    reasons = (found["errors"] or {}).get("data", ())
    lines = [found["id"], progress_line(found)]
    lines += [f"line {error['line'] or '-'}: {error['message']} [{error['code']}]" for error in reasons[:10]]
    if found["status"] not in ENDED:
        lines.append(f"time limit {_moment(found['expires_at'])}")
    run.show(found, lines)


def _moment(seconds: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))


@contextmanager
def _ingress_connection(run: Session, region: str, key: str) -> "Iterator[httpx.Client]":
    """A connection to the ingress of a region, with an application's key."""
    import httpx

    shown = key or run.environ.get(KEY_VARIABLE, "")
    headers = {"Authorization": f"Bearer {shown}"} if shown else {}
    timeout = httpx.Timeout(run.timeout_s, write=UPLOAD_WITHIN_S)
    with httpx.Client(base_url=_ingress(run, region), headers=headers, timeout=timeout, trust_env=False) as client:
        yield client


def _ingress(run: Session, region: str) -> str:
    if region:
        return ingress_of(run, "", region)
    urls = [str(row["ingress_url"]) for row in run.connection.pages("regions", {}) if row["ingress_url"]]
    if not urls:
        raise Failure("no region has an ingress", ExitCode.CONFLICT)
    return urls[0].rstrip("/")


def _answer(run: Session, client: "httpx.Client", method: str, path: str, **sent: Any) -> dict[str, Any]:
    with _failing(client):
        response = client.request(method, path, **sent)
        _check(response)
        answer: dict[str, Any] = response.json()
        return answer


def _fetch(run: Session, client: "httpx.Client", path: str, to: Path | None) -> None:
    with _failing(client), client.stream("GET", path) as response:
        _check(response)
        if to is None:
            for piece in response.iter_text():
                run.output.out.write(piece)
            return
        with to.open("xb") as file:
            for part in response.iter_bytes():
                file.write(part)
    run.output.note(f"wrote {to}")


def _check(response: "httpx.Response") -> None:
    if response.is_success:
        return
    response.read()
    try:
        message = error_message(response.json())
    except ValueError:
        message = response.text[:200]
    text = f"the ingress answered {response.status_code}: {message}"
    raise Failure(text, exit_code_of(response.status_code))


@contextmanager
def _failing(client: "httpx.Client") -> Iterator[None]:
    import httpx

    try:
        yield
    except httpx.TimeoutException:
        raise Failure(f"{client.base_url} did not answer in time (--timeout)", ExitCode.TIMED_OUT) from None
    except httpx.TransportError as error:
        raise Failure(f"cannot reach the ingress {client.base_url}: {error}", ExitCode.UNREACHABLE) from None
    except FileExistsError as error:
        raise Failure(f"{error.filename} exists; name another file", ExitCode.CONFLICT) from None
