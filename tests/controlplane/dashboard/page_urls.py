"""The URL of every page, for all tests that walk pages."""

LISTS: dict[str, str] = {
    "overview": "/",
    "audit": "/audit/",
    "benchmarks": "/benchmarks/",
    "batches-page": "/batches/",
    "cells": "/cells/",
    "deployments": "/deployments/",
    "engine-build-uploads": "/build-uploads/",
    "events": "/events/",
    "imports": "/imports/",
    "incidents": "/incidents/",
    "instance-types": "/instance-types/",
    "keys": "/keys/",
    "machines": "/machines/",
    "models": "/models/",
    "nodes": "/nodes/",
    "plan": "/plan/",
    "what-if": "/what-if/?factor=1.5",
    "playground": "/playground/",
    "regions": "/regions/",
    "rollouts": "/rollouts/",
    "search": "/search/?q=0",
    "traffic": "/traffic/",
    "usage": "/usage/",
    "costs": "/usage/costs/",
}
"""Name -> URL, of pages that list things."""
SETTINGS: dict[str, str] = {
    "settings": "/settings/",
    "settings-approvals": "/settings/approvals/",
    "settings-groups": "/settings/groups/",
    "settings-rules": "/settings/rules/",
    "settings-users": "/settings/users/",
    "settings-webhooks": "/settings/webhooks/",
    "settings-allowances": "/settings/allowances/",
}
FILTERED: tuple[str, ...] = (
    "/audit/?action=node.cordon&outcome=done",
    "/batches/?q=tenant&state=in_progress",
    "/cells/?q=deployment&region=region-0&deployment=deployment-0&state=ready",
    "/events/?kind=cell.ready&subject=region-0",
    "/imports/?q=model-0&state=queued",
    "/incidents/?state=all",
    "/instance-types/?q=local&origin=operator",
    "/keys/?q=search&state=active&tenant=tenant-0",
    "/nodes/?role=leader",
    "/rollouts/?state=active",
    "/usage/costs/?range=90d&group=tenant,class&deployment=deployment-0&region=region-0",
    "/usage/?range=90d&tenant=tenant-0&deployment=deployment-0",
)
"""Lists with every filter set; those of `fleets.one_more_of_everything` match."""
DETAILS: tuple[str, ...] = (
    "/cells/deployment-0-region-0-1/",
    "/cells/deployment-0-region-0-1/logs/",
    "/nodes/n-00000000/",
    "/machines/m-00000000/",
    "/why/cell:deployment-0-region-0-1/",
    "/regions/region-0/",
    "/instance-types/local.cpu/",
    "/nodes/n-000000aa/",
    "/deployments/deployment-0/",
    "/keys/0a000000/",
    "/batches/batch_00000000000000000000000000000000/",
    "/imports/1000/",
    "/models/model-0/",
    "/models/model-0@1/",
    "/builds/build-0/",
    "/models/model-0@1/diff/?against=model-0@1",
    "/runbooks/node-lost/",
)
"""Pages about one thing that `fleets.one_more_of_everything(0)` makes."""
FLEET_PAGES: tuple[str, ...] = (*LISTS.values(), *FILTERED, *DETAILS)
