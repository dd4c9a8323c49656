"""Login and logout. Wrong passwords are counted per user name and address; too many of them answer 429 for a while."""

import math
from typing import Any

from django.contrib.auth.forms import AuthenticationForm
from django.contrib.auth.views import LoginView
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render

from controlplane.accounts.services.login import (
    Attempt,
    login_failure_record,
    login_failures_forget,
    login_wait_s,
)
from controlplane.kernel import clock


class Login(LoginView):
    template_name = "accounts/login.html"
    redirect_authenticated_user = True

    def post(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        wait_s = math.ceil(login_wait_s(attempt=_attempt(request), now=clock.now()))
        if wait_s > 0:
            response = render(request, "accounts/limited.html", {"wait_min": math.ceil(wait_s / 60)}, status=429)
            response.headers["Retry-After"] = str(wait_s)
            return response
        return super().post(request, *args, **kwargs)

    def form_valid(self, form: AuthenticationForm) -> HttpResponse:
        login_failures_forget(attempt=_attempt(self.request))
        return super().form_valid(form)

    def form_invalid(self, form: AuthenticationForm) -> HttpResponse:
        login_failure_record(attempt=_attempt(self.request), now=clock.now())
        return super().form_invalid(form)


def _attempt(request: HttpRequest) -> Attempt:
    return Attempt(username=request.POST.get("username", "").strip(), address=request.META.get("REMOTE_ADDR") or "")
