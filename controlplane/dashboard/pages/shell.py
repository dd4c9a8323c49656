"""What every page carries beside its own content: the fleet's standing, in the navigation and in the browser's tab."""

from controlplane.dashboard.fragments import Asked, Fragment
from controlplane.dashboard.selectors.incidents import Standing, standing


def whole_fleet(asked: Asked) -> Standing:
    return standing()


SHELL = Fragment(
    name="standing",
    title="",
    topics=("incidents", "cells", "nodes", "approvals"),
    template="dashboard/parts/navigation.html",
    load=whole_fleet,
)
