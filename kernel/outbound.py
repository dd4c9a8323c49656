"""URLs that this control plane may call for users: webhooks, callbacks and identity providers. Public addresses only
by https; others only in networks that the owner of the installation allows. Pure: resolves no name."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from urllib.parse import unquote, urlsplit

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network
NAT64 = IPv6Network("64:ff9b::/96")
"""IPv4 addresses behind a translator, RFC 6052."""
SHORTEST_SECRET = 8
"""Minimum characters of a path segment that counts as secret."""


class RefusedUrl(ValueError):
    """The URL may not be called; the text says why and what is allowed."""


@dataclass(frozen=True, slots=True)
class Target:
    """A parsed URL. `path` includes the query."""

    scheme: str
    host: str
    port: int
    path: str
    authority: str = field(default="")


def parse_url(url: str) -> Target:
    """Parses a URL. Raises RefusedUrl if it is not an http or https URL with a host, or with user, fragment or unusual
    characters."""
    if any(ord(letter) <= 0x20 or ord(letter) >= 0x7F for letter in url):
        raise RefusedUrl("a URL must be ASCII without spaces; percent-encode other characters")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise RefusedUrl(f"not a URL: {error}") from error
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise RefusedUrl("must read https://host/path")
    if parts.username is not None or parts.password is not None or parts.fragment:
        raise RefusedUrl("must have no user, password or fragment")
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return Target(parts.scheme, parts.hostname, port or (443 if parts.scheme == "https" else 80), path, parts.netloc)


def host_of(target: Target) -> str:
    """Returns the host, with its port unless that is the default."""
    host = f"[{target.host}]" if ":" in target.host else target.host
    is_usual = target.port == (443 if target.scheme == "https" else 80)
    return host if is_usual else f"{host}:{target.port}"


def shown_url(url: str) -> str:
    """Returns a URL for display, without its path, which may be the receiver's secret."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return "…"
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}/…"


def without_path(text: str, target: Target) -> str:
    """Returns a receiver's text without the requested path, which error pages often repeat."""
    for part in sorted({target.path, unquote(target.path), *target.path.replace("?", "/").split("/")}, key=len)[::-1]:
        if len(part) >= SHORTEST_SECRET:
            text = text.replace(part, "…")
    return text


def check_url(url: str, allowed: Sequence[Network]) -> None:
    """Rejects URLs that can never be called. Names are resolved and checked at every attempt. Raises RefusedUrl as
    `parse_url` does, or if its address is not allowed."""
    target = parse_url(url)
    try:
        ip_address(target.host)
    except ValueError:
        return
    choose_address(target, [target.host], allowed)


def choose_address(target: Target, resolved: Iterable[str], allowed: Sequence[Network]) -> str:
    """Returns the address to connect to. All addresses of the name must be allowed, because the choice among them is
    arbitrary. Raises RefusedUrl if the name has no address, or one is neither public nor allowed, or is public and the
    URL is http."""
    addresses = [_unwrap_ipv4(ip_address(text.partition("%")[0])) for text in resolved]
    if not addresses:
        raise RefusedUrl(f"{target.host} has no address")
    for address in addresses:
        if any(address.version == network.version and address in network for network in allowed):
            continue
        if not is_public(address):
            raise RefusedUrl(f"{target.host} is {address}, which is not a public address and not allowed")
        if target.scheme != "https":
            raise RefusedUrl(f"{target.host} is {address}: only https is allowed there")
    return str(addresses[0])


def is_public(address: Address) -> bool:
    """Whether an address is on the public internet: not private, loopback, link-local (metadata services of clouds),
    shared, multicast, reserved or unspecified."""
    return address.is_global and not address.is_multicast and not address.is_reserved


def parse_networks(texts: Sequence[str]) -> tuple[Network, ...]:
    """Parses networks such as `127.0.0.0/8` or `10.1.2.3`. Raises ValueError if one is invalid."""
    return tuple(ip_network(text.strip()) for text in texts if text.strip())


def _unwrap_ipv4(address: Address) -> Address:
    """An IPv4 address inside an IPv6 address is checked as IPv4."""
    if isinstance(address, IPv6Address):
        if address in NAT64:
            return IPv4Address(int(address) & 0xFFFFFFFF)
        inner = address.ipv4_mapped or address.sixtofour or (address.teredo[1] if address.teredo else None)
        return inner or address
    return address
