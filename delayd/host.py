"""Host names: which texts can be a host at all, checked before anybody tries to connect.

A host is an IP address, or a name that the resolver can be asked for: labels of letters, digits, hyphens and
underscores. IDNA turns names outside of ASCII into such labels. Whether a host exists is found out by connecting.
"""

import ipaddress
import re

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
