"""Allowed URLs: form, addresses, plain http, and what is shown of a URL."""

import pytest

from kernel.outbound import RefusedUrl, choose_address, parse_networks, parse_url, shown_url, without_path

HTTPS = parse_url("https://hooks.example.com/a?b=c")
PUBLIC = "93.184.216.34"


def test_an_address_is_taken_apart() -> None:
    assert (HTTPS.scheme, HTTPS.host, HTTPS.port, HTTPS.path) == ("https", "hooks.example.com", 443, "/a?b=c")
    assert parse_url("http://[::1]:8080").port == 8080


@pytest.mark.parametrize(
    "url",
    [
        "",
        "ftp://example.com",
        "https://",
        "https://user:pw@example.com/",
        "https://example.com/#part",
        "https://example.com/a b",
        "https://example.com/\r\nX: y",
        "https://example.com:99999/",
        "//example.com",
        "https://exämple.com/",
    ],
)
def test_what_is_no_plain_address_is_refused(url: str) -> None:
    with pytest.raises(RefusedUrl):
        parse_url(url)


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "10.1.2.3",
        "172.16.0.1",
        "192.168.1.1",
        "169.254.169.254",
        "100.64.0.1",
        "0.0.0.0",  # noqa: S104
        "224.0.0.1",
        "255.255.255.255",
        "::1",
        "::",
        "fe80::1%eth0",
        "fd00:ec2::254",
        "::ffff:127.0.0.1",
        "::ffff:169.254.169.254",
        "64:ff9b::7f00:1",
        "2002:7f00:1::",
        "ff02::1",
    ],
)
def test_what_is_not_public_is_refused(address: str) -> None:
    with pytest.raises(RefusedUrl, match="not a public address"):
        choose_address(HTTPS, [address], ())


def test_one_private_address_among_public_ones_is_enough_to_refuse() -> None:
    assert choose_address(HTTPS, [PUBLIC], ()) == PUBLIC
    with pytest.raises(RefusedUrl):
        choose_address(HTTPS, [PUBLIC, "10.0.0.1"], ())
    with pytest.raises(RefusedUrl, match="no address"):
        choose_address(HTTPS, [], ())


def test_plain_http_is_for_allowed_networks_only() -> None:
    plain = parse_url("http://hooks.example.com/")
    with pytest.raises(RefusedUrl, match="only https"):
        choose_address(plain, [PUBLIC], ())
    allowed = parse_networks(["10.0.0.0/8", ""])
    assert choose_address(plain, ["10.1.2.3"], allowed) == "10.1.2.3"
    with pytest.raises(RefusedUrl):
        choose_address(plain, ["10.1.2.3", "127.0.0.1"], allowed)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://hooks.slack.com/services/T0/B0/XXXX", "https://hooks.slack.com/…"),
        ("https://pager.example:8443/x?key=1", "https://pager.example:8443/…"),
        ("https://me:pw@pager.example/x", "https://pager.example/…"),
        ("https://pager.example", "https://pager.example/…"),
        ("http://[::1", "…"),
    ],
)
def test_of_an_address_only_the_host_is_shown(url: str, shown: str) -> None:
    assert shown_url(url) == shown


def test_what_a_receiver_says_is_kept_without_the_path_that_it_was_asked_for() -> None:
    target = parse_url("https://pager.example/hook/se%63ret-token-1?key=other-secret")
    said = (
        "no /hook/secret-token-1?key=other-secret here; se%63ret-token-1 is gone, key=other-secret too; a hook is not"
    )
    assert without_path(said, target) == "no … here; … is gone, … too; a hook is not"
