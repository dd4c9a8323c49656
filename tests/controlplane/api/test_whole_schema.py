"""Schemathesis asks what the OpenAPI document allows, and more: no server error, no answer that it does not promise.

Deterministic: the same requests every time. `SWITCHYARD_SCHEMA_EXAMPLES=400` asks more of each operation by hand.
Long, because the default run has cheaper tests of the same: `DescribedClient` checks the responses of all tests,
`test_odd_values.py` sends odd values, and `test_api_matrix.py` sends requests without a token.
Schemathesis takes a second to import: only who runs this does.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from django.core.signals import request_finished, request_started
from django.core.wsgi import get_wsgi_application
from django.db import close_old_connections, transaction
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pytest_django import DjangoDbBlocker

from tests.controlplane.api.client import DescribedClient, bearer, document
from tests.controlplane.api.test_query_counts import one_more_of_everything
from tests.rows_of_a_file import rows_of_a_file

if TYPE_CHECKING:
    from schemathesis import GenerationMode
    from schemathesis.checks import CheckFunction

pytestmark = pytest.mark.django_db

EXAMPLES = int(os.environ.get("SWITCHYARD_SCHEMA_EXAMPLES", "4"))
KEYS = ("id", "name", "prefix", "rule", "deployment", "ingress", "username", "action", "number", "tenant", "region")
"""Fields of list rows that are the parameters of detail paths."""


def checks() -> "list[CheckFunction]":
    """Conditions for every response."""
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi import checks as promises

    return [
        not_a_server_error,
        promises.status_code_conformance,
        promises.content_type_conformance,
        promises.response_headers_conformance,
        promises.response_schema_conformance,
    ]


def operations() -> list[Any]:
    """Every operation of the document. Read by the test, not by all workers that collect it."""
    import schemathesis

    schema = schemathesis.openapi.from_dict(document())
    schema.app = get_wsgi_application()
    return [found.ok() for found in schema.get_all_operations()]  # type: ignore[union-attr] # none is broken


@pytest.fixture(autouse=True)
def _no_limits(settings: Any) -> None:
    settings.API_READS_PER_MIN = settings.API_WRITES_PER_MIN = settings.API_ANONYMOUS_REQUESTS_PER_MIN = 0


@pytest.fixture(scope="module", autouse=True)
def _one_of_everything(django_db_setup: None, django_db_blocker: DjangoDbBlocker) -> Iterator[None]:
    with rows_of_a_file(django_db_blocker):
        one_more_of_everything(0)
        yield


@contextmanager
def one_transaction() -> Iterator[None]:
    """Rolls back all changes. As in Django's own client, the end of a request does not close the connection."""
    signals = (request_started, request_finished)
    for signal in signals:
        signal.disconnect(close_old_connections)
    try:
        with transaction.atomic():
            yield
            transaction.set_rollback(True)
    finally:
        for signal in signals:
            signal.connect(close_old_connections)


def requests_of(operation: Any, mode: "GenerationMode", known: dict[str, str]) -> st.SearchStrategy[Any]:
    """Valid and invalid requests; half of those for one object name an existing one."""
    made: st.SearchStrategy[Any] = operation.as_strategy(mode)
    return st.one_of(made, operation.as_strategy(mode, path_parameters=known)) if known else made


def something_there(client: DescribedClient, path: str) -> dict[str, str]:
    """The path parameters of the first object in the list above this path."""
    above, brace, _ = path.partition("/{")
    if not brace:
        return {}
    listed = client.get(above)
    rows = listed.json().get("results", []) if listed.status_code == 200 else []
    parameter = path.partition("{")[2].partition("}")[0]
    return {parameter: str(next(rows[0][key] for key in KEYS if key in rows[0]))} if rows else {}


def send(case: Any, headers: dict[str, str]) -> Any:
    """One request, whose changes are rolled back."""
    with one_transaction():
        response = case.call(headers=headers)
    case.validate_response(response, checks=checks())
    return response


def fuzz(cases: st.SearchStrategy[Any], headers: dict[str, str], examples: int) -> list[Any]:
    """Send this many requests, and return them."""
    sent: list[Any] = []

    @settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=cases)
    def run(case: Any) -> None:
        send(case, headers)
        sent.append(case)

    run()
    return sent


@pytest.mark.long
@pytest.mark.timeout(600)
def test_every_response_is_promised_and_anonymous_requests_get_none() -> None:
    client = bearer()
    broken = []
    for operation in operations():
        try:
            check(operation, client)
        except Exception as error:
            error.add_note(operation.label)
            broken.append(error)
    if broken:
        raise ExceptionGroup(f"operations that break their promise: {len(broken)}", broken)


def check(operation: Any, client: DescribedClient) -> None:
    """Valid requests, invalid requests, and requests without a token."""
    from schemathesis import GenerationMode

    token = {"Authorization": client._credentials["HTTP_AUTHORIZATION"]}  # type: ignore[attr-defined] # of APIClient
    known = something_there(client, operation.path)
    allowed = fuzz(requests_of(operation, GenerationMode.POSITIVE, known), token, EXAMPLES)
    if operation.query or operation.body:
        fuzz(requests_of(operation, GenerationMode.NEGATIVE, known), token, max(1, EXAMPLES // 2))
    anonymous = {send(case, {}).status_code for case in allowed[: max(1, EXAMPLES // 4)]}
    assert anonymous <= {400, 401, 404}, f"{operation.label}: 404 for paths that no route has"
