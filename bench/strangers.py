"""How strangers come to a port of web: with TLS where it is the one for agents, whose authority they do not know."""

import ssl


def tls_to(url: str) -> ssl.SSLContext | None:
    """For connections to this URL; None: they are plain."""
    if not url.startswith("https://"):
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context
