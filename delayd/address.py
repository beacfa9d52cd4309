"""Address: reads ``host:port`` texts, and chooses the meta server's address when none was given.

A host is an IP address, or a name that the resolver can be asked for: labels of letters, digits, hyphens and
underscores. IDNA turns names outside of ASCII into such labels. Whether a host exists is found out by connecting.
"""

from __future__ import annotations

import ipaddress
import os
import re
from typing import Annotated, NamedTuple

# The environment variable with the meta server's address, for clients and the command line.
META_VARIABLE = "DELAYD_META"
META_PORT = 7400
META_LOCAL = f"127.0.0.1:{META_PORT}"
PORT_MAX = 65_535
PORT_DIGITS_MAX = 5  # Python refuses to read thousands of digits as a number.

INSIDE_SUFFIX = ".inside.invalid"  # Such a name is found nowhere else, on no network (RFC 2606).

# What a head says of an endpoint: a host that a connection can be tried to (`host_fault`), and a port of it.
Host = Annotated[str, "host"]
Port = Annotated[int, "1..65535"]

_TEXT_SHOWN = 300  # This much of a text that is not an address is shown: enough to see where it came from.


class Endpoint(NamedTuple):
    """Where a server listens, and how it is reached: all that `delayd.net.endpoint` needs to know of it.

    It is handed on as one value, so whatever else a connection will need stands here and is read there alone. An IPv6
    host is without its brackets; the text has them, and `read_address` reads it back. It goes over the wire as a
    declared row (`delayd.wire.heads.read_row`), so its fields are those of heads.
    """

    host: Host
    port: Port

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_inside(self) -> bool:
        """Whether it is that of a home within a program (`delayd.open`), in this process or in another one."""
        return self.host.endswith(INSIDE_SUFFIX)


def meta_address(given: str | None) -> str:
    """The meta server's address: the one given, that of the environment, or this machine's own."""
    return given if given is not None else os.environ.get(META_VARIABLE) or META_LOCAL


def read_address(text: str) -> Endpoint | str:
    """The address in ``host:port`` or ``[IPv6]:port``; otherwise the sentence that says what is wrong with the text."""
    shown = repr(text[:_TEXT_SHOWN])
    scheme, mark, rest = text.partition("://")
    if mark:
        return (
            f"{shown} is a URL, and delayd speaks its own protocol over TCP; leave {scheme[:20]}:// out, such as"
            f" {rest.partition('/')[0][:_TEXT_SHOWN] or META_LOCAL}"
        )
    host, colon, port = text.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not colon or not bare or (":" in bare and bare == host):
        return f"{shown} is no address; write host:port, such as {META_LOCAL}, with an IPv6 host in brackets"
    fault = host_fault(bare)
    if fault is not None:
        return f"{shown} names no host, for {fault}; write host:port, such as {META_LOCAL}"
    if not (port.isascii() and port.isdigit() and len(port) <= PORT_DIGITS_MAX and 0 < int(port) <= PORT_MAX):
        return f"the port of {shown} must lie within 1 and {PORT_MAX}; write host:port, such as {META_LOCAL}"
    return Endpoint(bare, int(port))


HOST_BYTES_MAX = 253  # The longest name in DNS.

_NAME = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*\.?")
_SCOPE = re.compile(r"[A-Za-z0-9_.-]+")  # The scope of a link-local IPv6 address: the name of an interface.


def host_fault(host: str) -> str | None:
    """Why nobody could connect to this host, whatever the network is like; None when it may be possible."""
    if not host:
        return "it is empty"
    address, percent, scope = host.partition("%")
    try:
        ipaddress.ip_address(address)
    except ValueError:
        return _name_fault(host)
    return None if not percent or _SCOPE.fullmatch(scope) else "its scope is no name of an interface"


def _name_fault(host: str) -> str | None:
    try:
        # The same encoding as the resolver's: a label has 1 to 63 bytes.
        name = host.encode("idna").decode("ascii")
    except UnicodeError:
        return "a part of it is empty, has more than 63 bytes, or can't be encoded"
    if len(name) > HOST_BYTES_MAX:
        return f"it is longer than {HOST_BYTES_MAX} bytes"
    if _NAME.fullmatch(name) is None:
        return "it has a character that no host name has"
    return None
