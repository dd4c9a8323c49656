"""Puts into a request what the fleet sets, before it goes to the engine, or says what is wrong with it."""

from engine_agent.cell_proxy import refusal as refusals
from engine_agent.cell_proxy.admission import BadHeader, RequestMetadata, read_limits
from engine_agent.cell_proxy.refusal import Refusal
from engine_agent.cell_proxy.rewrite import PRIORITIES, BadBody, BodyRewrite, NeedsStore, rewrite_body
from engine_agent.cell_proxy.settings import ProxySettings
from engine_agent.cell_proxy.upload import Upload
from engine_agent.cell_proxy.wire import ENGINE_PRIORITY_HEADER, RequestHead
from engine_agent.protocol.request_bodies import BadRequest


def prepare(
    head: RequestHead, upload: Upload, metadata: RequestMetadata, settings: ProxySettings
) -> BodyRewrite | Refusal:
    """What was put into `upload`, or a refusal."""
    if any(name == b"content-encoding" and value.lower() != b"identity" for name, value in head.headers):
        return refusals.body_encoded()
    priority = PRIORITIES[metadata.serving_class] if settings.priorities else None
    model = (metadata.adapter or settings.model) if metadata.is_routed else None
    try:
        rewrite = rewrite_body(
            head.path, upload.whole(), priority, model, metadata.routed_by, read_limits(head.headers)
        )
    except BadHeader as error:
        return error.refusal
    except BadRequest as error:
        return refusals.bad_member(error)
    except NeedsStore as member:
        return refusals.needs_store(str(member))
    except BadBody as error:
        return refusals.bad_body(str(error))
    if priority:
        upload.headers.append((ENGINE_PRIORITY_HEADER, b"%d" % priority))
    upload.members = rewrite.members
    return rewrite
