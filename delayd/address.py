"""Address: reads ``host:port`` and ``delayds://host:port`` texts, and chooses the meta server's address when none was
given.

     delayd://[TOKEN@]HOST:PORT[?in_clear=yes]     as HOST:PORT; a token is sent to this machine only, unless
                                                   ``in_clear`` says that others may read it
     delayds://[TOKEN@]HOST:PORT[?ca=FILE&cert=FILE&key=FILE&name=NAME]     over TLS

Both may have ``secret=FILE``, the cluster's secret, which is proved to each server.

A host is an IP address, or a name that the resolver can be asked for: labels of letters, digits, hyphens and
underscores. IDNA turns names outside of ASCII into such labels. Whether a host exists is found out by connecting.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Mapping
from typing import Annotated, NamedTuple
from urllib.parse import parse_qsl, quote, unquote, urlencode

# The environment variable with the meta server's address, for clients and the command line.
META_VARIABLE = "DELAYD_META"
# Those with a client's token, and with the files of ``delayds://`` addresses that name none.
TOKEN_VARIABLE = "DELAYD_TOKEN"
TLS_VARIABLES = {"ca": "DELAYD_TLS_CA", "cert": "DELAYD_TLS_CERT", "key": "DELAYD_TLS_KEY"}
META_PORT = 7400
META_LOCAL = f"127.0.0.1:{META_PORT}"
PORT_MAX = 65_535
PORT_DIGITS_MAX = 5  # Python refuses to read thousands of digits as a number.

INSIDE_SUFFIX = ".inside.invalid"  # Such a name is found nowhere else, on no network (RFC 2606).

# What a head says of an endpoint: a host that a connection can be tried to (`host_fault`), and a port of it.
Host = Annotated[str, "host"]
Port = Annotated[int, "1..65535"]

_TLS_NAMES = ("ca", "cert", "key", "name")
_SCHEMES = {"delayd": ("in_clear", "secret"), "delayds": (*_TLS_NAMES, "secret")}  # What each may have behind "?".
_TEXT_SHOWN = 300  # This much of a text that is not an address is shown: enough to see where it came from.


class Tls(NamedTuple):
    """The files of one side of an encrypted connection, each in PEM; "" for one that it does not have."""

    ca: str = ""  # Who may sign the certificates of servers; "": the authorities that this machine trusts.
    cert: str = ""  # This side's own certificate, with those between it and its authority.
    key: str = ""
    name: str = ""  # The name that the server's certificate has to have; "": the host that is dialled.
    client_ca: str = ""  # Who may sign the certificates of those who connect; "": they need none.


class Access(NamedTuple):
    """How a server lets this side in: over TLS or not, and with which token."""

    tls: Tls | None = None
    token: str = ""
    in_clear: bool = False  # The token may be sent without TLS, too.
    secret: str = ""  # The file with the cluster's secret, for an operator or a server.

    def __repr__(self) -> str:
        return f"Access(tls={self.tls}, token={'…' if self.token else ''!r}, secret={self.secret!r})"


OPEN = Access()
NOT_SENT = "not sent"
OwnAccess = Annotated[Access, NOT_SENT]  # A field that this side has for itself.


class Endpoint(NamedTuple):
    """Where a server listens, and how it is reached: all that `delayd.net.endpoint` needs to know of it.

    It is handed on as one value, so whatever else a connection will need stands here and is read there alone. An IPv6
    host is without its brackets; the text has them, and `read_address` reads it back. It goes over the wire as a
    declared row (`delayd.wire.heads.read_row`), so its fields are those of heads. Its access is this side's own, and
    goes nowhere.
    """

    host: Host
    port: Port
    access: OwnAccess = OPEN

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        """The text that `read_address` reads back whole, with its access; it may have a token in it."""
        if self.access == OPEN:
            return str(self)
        tls, token, in_clear, secret = self.access
        asked = {"in_clear": "yes"} if in_clear else {}
        if tls is not None:
            asked = {name: value for name in _TLS_NAMES if (value := getattr(tls, name))}
        if secret:
            asked["secret"] = secret
        user = f"{quote(token, safe='')}@" if token else ""
        query = urlencode(asked, safe="/")
        return f"delayd{'s' * (tls is not None)}://{user}{self}{f'?{query}' if asked else ''}"

    @property
    def is_here(self) -> bool:
        """Whether nobody on another machine reaches it."""
        return self.is_inside or is_loopback(self.host)

    @property
    def shown(self) -> Access:
        """How this side enters: as `access` says; a program asks itself for nothing."""
        return OPEN if self.is_inside else self.access

    @property
    def is_inside(self) -> bool:
        """Whether it is that of a home within a program (`delayd.open`), in this process or in another one."""
        return self.host.endswith(INSIDE_SUFFIX)


def meta_address(given: str | None) -> str:
    """The meta server's address: the one given, that of the environment, or this machine's own."""
    return given if given is not None else os.environ.get(META_VARIABLE) or META_LOCAL


def completed(text: str, token: str | None = None) -> str:
    """An address with a client's token, and with what the environment says about tokens and TLS where it is silent.

    A text that is no address is given back as it is: `read_address` says what is wrong with it.
    """
    found = read_address(text)
    if isinstance(found, str):
        return text
    tls = found.access.tls
    if tls is not None:
        own = {name: getattr(tls, name) or os.environ.get(variable, "") for name, variable in TLS_VARIABLES.items()}
        tls = tls._replace(**own)
    chosen = token or found.access.token or os.environ.get(TOKEN_VARIABLE, "")
    return found._replace(access=found.access._replace(tls=tls, token=chosen)).url


def read_address(text: str) -> Endpoint | str:
    """The address in ``host:port``, ``[IPv6]:port`` or a URL of ``delayd://`` or ``delayds://``; otherwise the sentence
    that says what is wrong with the text.
    """
    scheme, mark, rest = text.partition("://")
    if mark:
        return _read_url(scheme, rest)
    return _read_place(text)


def _read_url(scheme: str, rest: str) -> Endpoint | str:
    before, _, query = rest.partition("?")
    user, _, place = before.rpartition("@")
    place = place.removesuffix("/")
    if scheme not in _SCHEMES:
        return (
            f"{f'{scheme[:20]}://{place[:_TEXT_SHOWN]}'!r} is a URL, and delayd speaks its own protocol over TCP; leave"
            f" {scheme[:20]}:// out, such as {place.partition('/')[0][:_TEXT_SHOWN] or META_LOCAL}, or write delayds://"
            " for TLS"
        )
    found = _read_place(place)
    if isinstance(found, str):
        return found
    try:
        asked = dict(parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query)))
    except ValueError:
        return f"the part of {place} behind its question mark is no list of name=value; correct it"
    known = _SCHEMES[scheme]
    for name in asked:
        if name not in known:
            return f"{name[:50]!r} is nothing that a {scheme}:// address has; it may have {', '.join(known)}"
    access = _access(scheme, unquote(user), asked)
    return access if isinstance(access, str) else found._replace(access=access)


def _access(scheme: str, token: str, asked: Mapping[str, str]) -> Access | str:
    if scheme == "delayd":
        if asked.get("in_clear", "yes") != "yes":
            return "in_clear= of a delayd:// address is yes, or is left out"
        return Access(None, token, "in_clear" in asked, asked.get("secret", ""))
    if bool(asked.get("cert")) != bool(asked.get("key")):
        return "cert= and key= of a delayds:// address go together: give both files, or neither"
    files = {name: value for name, value in asked.items() if name in _TLS_NAMES}
    return Access(Tls(**files), token, secret=asked.get("secret", ""))


def _read_place(text: str) -> Endpoint | str:
    shown = repr(text[:_TEXT_SHOWN])
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


def is_loopback(host: str) -> bool:
    """Whether a host is this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


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
