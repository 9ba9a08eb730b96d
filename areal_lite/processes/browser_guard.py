"""Tell a program's HTTP request from one that a web page makes a browser send.

Guarantees that a page in a browser on this machine cannot use a server that listens here: pages cannot avoid the Origin
or Sec-Fetch-Site header, cannot send JSON's content type without a preflight request, and after DNS rebinding they send
their own Host. A server of pages is used only by its own. Knows no HTTP library.
"""

import ipaddress
from collections.abc import Mapping
from typing import NamedTuple


class Refusal(NamedTuple):
    """Why a request is refused."""

    status: int
    message: str


def refusal_of(headers: Mapping[str, str], *, has_body: bool, host_names: frozenset[str]) -> Refusal | None:
    """Return why a request is refused, None if a program sent it; empty ``host_names`` allow every host."""
    host = headers.get("Host", "")
    if host_names and _name(host) not in host_names:
        return Refusal(403, f"the Host is {host[:80]!r}: use {sorted(host_names)[0]}")
    if "Origin" in headers or headers.get("Sec-Fetch-Site", "none") != "none":
        return Refusal(403, "requests of web pages are not served: send no Origin and no Sec-Fetch-Site")
    kind = headers.get("Content-Type", "")
    if has_body and kind.partition(";")[0].strip().lower() != "application/json":
        return Refusal(415, f"the content type is {kind[:80]!r}: send application/json")
    return None


def foreign_page_refusal(
    headers: Mapping[str, str], *, host_names: frozenset[str], is_document: bool
) -> Refusal | None:
    """Return why a server of pages refuses a request; None if a program or one of its own pages sent it. A document may
    be opened by a link on any page, which cannot read what it gets."""
    host = headers.get("Host", "")
    if _name(host) not in host_names:
        return Refusal(403, f"the Host is {host[:80]!r}: use {sorted(host_names)[0]}")
    origin = headers.get("Origin", f"http://{host}")
    site = headers.get("Sec-Fetch-Site", "none")
    is_link = (
        is_document and headers.get("Sec-Fetch-Mode") == "navigate" and headers.get("Sec-Fetch-Dest") == "document"
    )
    if origin != f"http://{host}" or (site not in ("none", "same-origin") and not is_link):
        return Refusal(403, "other web pages are not served: open the address in a tab of its own")
    return None


def loopback_names(host: str) -> frozenset[str]:
    """Return the hosts that clients may name for a server bound to ``host``; empty unless that is loopback."""
    try:
        loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = host == "localhost"
    return frozenset({host, "127.0.0.1", "::1", "localhost"}) if loopback else frozenset()


def _name(host: str) -> str:
    if host.startswith("["):
        name, bracket, port = host[1:].lower().partition("]")
        return name if bracket and port[:1] in ("", ":") else ""
    return host.partition(":")[0].lower()
