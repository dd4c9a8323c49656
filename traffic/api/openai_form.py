"""What applications read of the control plane's own answers under /v1/: errors in OpenAI's form, for every method."""

from collections.abc import Callable, Mapping
from functools import wraps

from django.http import HttpRequest, HttpResponseBase, JsonResponse

from engine_agent.protocol.api_surface import ErrorForm, error_object

View = Callable[..., HttpResponseBase]


def openai_error(
    status: int,
    code: str | None,
    message: str,
    param: str | None = None,
    headers: Mapping[str, str] | None = None,
    kind: str | None = None,
) -> JsonResponse:
    """An error response. `kind`: its type, where it is not that of its status."""
    error = error_object(ErrorForm.OPENAI, status, message, code=code, param=param, kind=kind)
    return JsonResponse(error, status=status, headers=dict(headers or {}))


def only(*methods: str) -> Callable[[View], View]:
    """Answer 405 to every method but these, and HEAD where GET is one of them."""

    def decorate(view: View) -> View:
        @wraps(view)
        def answer(request: HttpRequest, *arguments: object, **named: object) -> HttpResponseBase:
            if request.method in methods or (request.method == "HEAD" and "GET" in methods):
                return view(request, *arguments, **named)
            message = f"{request.method} is not allowed on {request.path}; use {' or '.join(methods)}"
            return openai_error(405, "method_not_allowed", message, headers={"Allow": ", ".join(methods)})

        return answer

    return decorate
