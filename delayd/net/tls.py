"""TLS: a connection's bytes are encrypted between the socket and the connection.

     socket ◀──records──▶ TlsEnd ◀──bytes──▶ Connection
              transport of the socket   transport of the Connection

A `TlsEnd` is the protocol of the socket, and the transport of the protocol over it; neither of these two knows of TLS.
Without TLS there is no such object between them.

Invariant: no byte reaches the protocol before the handshake has succeeded, and none leaves in the clear; except that a
peer without TLS is told so in the clear, by its own protocol, and nothing is read from it.

A side that dials always checks the certificate of the server: its authority, its time and its name. A server reads its
files again when they change, for connections that begin from then on. Files that can't be used are named in the log,
and the server goes on with what it has.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import ssl
import stat
import threading
from collections.abc import Callable, Iterable
from typing import Generic, NamedTuple, Protocol, TypeVar, cast

from delayd.address import Endpoint, Tls
from delayd.batch.columns import Buffer
from delayd.errors import BadSetting, DelaydError, NotEncrypted, TlsRequired
from delayd.machine.operating import LogLimit
from delayd.secret import NO_FILE, Seen

HANDSHAKE_S = 10.0  # Two round trips, and a signature that takes milliseconds.
READ_BYTES = 256 << 10
JOINED_BYTES_MAX = 256 << 10  # Pieces of one write become as few records as there can be; a copy is less than a record.
ENCRYPTED_BYTES_MAX = 1 << 20  # So much is encrypted before it is given to the socket.
CHANNEL = "tls_channel"  # The extra information of a transport by which both ends know the server's certificate.

_RECORDS = (0x14, 0x15, 0x16, 0x17)  # How a record of TLS begins.

log = logging.getLogger(__name__)
limited = LogLimit(log)


class Refuses(Protocol):
    """What an accepted protocol has besides."""

    def refuse(self, error: DelaydError) -> None:
        """Tell the peer why the connection ends, and end it."""


P = TypeVar("P", bound=asyncio.BufferedProtocol)


class _Room(threading.local):
    """The bytes that one thread has read last; they are given on before it reads again."""

    def __init__(self) -> None:
        self.view = memoryview(bytearray(READ_BYTES))


_room = _Room()


class TlsEnd(asyncio.Transport, asyncio.BufferedProtocol, Generic[P]):
    """One end of an encrypted connection, for the protocol ``inner``.

    ``ended`` is called once with why the handshake failed, or None when it has succeeded.
    """

    def __init__(
        self,
        inner: P,
        context: ssl.SSLContext,
        ended: Callable[[TlsEnd[P], Exception | None], None],
        *,
        channel: bytes = b"",
        name: str | None = None,
        cert: str = "",
    ) -> None:
        """``name`` is that of the server that is dialled; a server has None, and ``channel``: its certificate's.
        ``cert`` is the file of the certificate that a side that dials shows.
        """
        super().__init__()
        self.inner = inner
        self._context = context
        self._ended: Callable[[TlsEnd[P], Exception | None], None] | None = ended
        self._name = name
        self._cert = cert
        self._refused: CertificateRefused | None = None
        self._channel = channel
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._ssl = context.wrap_bio(self._in, self._out, server_side=name is None, server_hostname=name)
        self._line: asyncio.Transport | None = None
        self._limit: asyncio.TimerHandle | None = None
        self._begun = False  # The peer has sent something.
        self._open = False
        self._clear = False  # The peer has no TLS; the protocol of this side tells it so.
        self._reading = True
        self._closing = False
        self._deaf = False  # This side has ended what it says, and drops what still comes.

    # Calls of the socket's transport.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin the handshake."""
        self._line = cast(asyncio.Transport, transport)
        self._limit = asyncio.get_running_loop().call_later(HANDSHAKE_S, self._overdue)
        if self._name is not None:
            self._shake()

    def get_buffer(self, sizehint: int) -> memoryview:
        """The buffer for the socket to read into."""
        return _room.view

    def buffer_updated(self, nbytes: int) -> None:
        """More bytes of the peer have arrived."""
        if self._deaf or self._clear or self._line is None:
            return
        arrived = _room.view[:nbytes]
        if not self._begun:
            self._begun = True
            if arrived[0] not in _RECORDS:
                self._meet_clear()
                return
        self._in.write(arrived)
        if not self._open:
            self._shake()
        if self._open:
            self._give()

    def eof_received(self) -> bool:
        """The peer has closed its side."""
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """The socket is closed."""
        self._line = None
        self._closing = True
        self._end_handshake(exc or ConnectionResetError("the peer closed the connection during the handshake"))
        self.inner.connection_lost(exc or self._refused)

    def pause_writing(self) -> None:
        """The socket is full."""
        if self._open:
            self.inner.pause_writing()

    def resume_writing(self) -> None:
        """The socket takes bytes again."""
        if self._open:
            self.inner.resume_writing()

    # Calls of the protocol, as its transport.

    def write(self, data: Buffer) -> None:
        """Encrypt and send."""
        self.writelines((data,))

    def writelines(self, list_of_data: Iterable[Buffer]) -> None:
        """Encrypt and send."""
        if self._line is None or self._closing:
            return
        pieces = list(list_of_data)
        if self._clear:
            self._line.writelines(pieces)
            return
        if len(pieces) > 1 and sum(map(len, pieces)) <= JOINED_BYTES_MAX:
            pieces = [b"".join(pieces)]
        try:
            for piece in pieces:
                view = memoryview(piece).cast("B")
                while view:
                    view = view[self._ssl.write(view) :]
                    if self._out.pending > ENCRYPTED_BYTES_MAX:
                        self._flush()
        except ssl.SSLError as error:
            self._break(error)
            return
        self._flush()

    def get_write_buffer_size(self) -> int:
        """Bytes that have not left."""
        return 0 if self._line is None else self._line.get_write_buffer_size()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """See asyncio."""
        if self._line is not None:
            self._line.set_write_buffer_limits(high, low)

    def get_extra_info(self, name: str, default: object = None) -> object:
        """As of the socket; also `CHANNEL`, and the ``sslcontext`` by which others tell that it is encrypted."""
        if name == CHANNEL:
            return self._channel
        if name == "sslcontext" and self._open:
            return self._context
        return default if self._line is None else self._line.get_extra_info(name, default)

    def is_reading(self) -> bool:
        """Whether bytes are taken."""
        return self._reading and not self._closing

    def pause_reading(self) -> None:
        """Take no bytes."""
        self._reading = False
        if self._line is not None:
            self._line.pause_reading()

    def resume_reading(self) -> None:
        """Take bytes again."""
        if self._reading or self._line is None:
            return
        self._reading = True
        self._line.resume_reading()
        asyncio.get_running_loop().call_soon(self._give)

    def can_write_eof(self) -> bool:
        """Yes: the peer hears the end, and this side waits for that of the peer."""
        return True

    def write_eof(self) -> None:
        """Say that nothing follows, and drop what still comes until the peer closes its side."""
        self._say_end()
        self._deaf = True
        if self._line is not None:
            self._line.write_eof()

    def is_closing(self) -> bool:
        """Whether it is closed or about to be."""
        return self._closing or self._line is None or self._line.is_closing()

    def close(self) -> None:
        """Let all that was written leave, and close."""
        if self._closing:
            return
        self._say_end()
        self._closing = True
        if self._line is not None:
            self._line.close()

    def abort(self) -> None:
        """Close at once."""
        self._closing = True
        if self._line is not None:
            self._line.abort()

    # In between.

    def _shake(self) -> None:
        try:
            self._ssl.do_handshake()
        except ssl.SSLWantReadError:
            self._flush()
            return
        except ssl.SSLError as error:
            self._flush()  # It says to the peer what is wrong.
            self._end_handshake(error)
            self.close()
            return
        self._flush()
        if self._name is not None:
            self._channel = channel_of(self._ssl.getpeercert(binary_form=True) or b"")
        self._open = True
        self._end_handshake(None)
        self.inner.connection_made(self)

    def _meet_clear(self) -> None:
        """The peer has no TLS."""
        if self._name is not None:
            self._end_handshake(_NoTls("it answers without TLS"))
            self.abort()
            return
        self._clear = True
        self._end_handshake(_NoTls("the peer has no TLS"))
        self.inner.connection_made(self)
        cast(Refuses, self.inner).refuse(
            TlsRequired(
                "this port takes connections over TLS only; write delayds:// in front of its address, or give a server"
                " tls_cert and tls_key"
            )
        )

    def _give(self) -> None:
        """Give decrypted bytes to the protocol while it takes them."""
        if not self._open:
            return
        more = True
        while more and self._reading and not self._closing and not self._deaf:
            room = memoryview(self.inner.get_buffer(-1))
            filled, ended = 0, False
            try:
                while filled < len(room):
                    read = self._ssl.read(len(room) - filled, room[filled:])
                    ended = not read
                    if ended:
                        break
                    filled += cast(int, read)
            except ssl.SSLWantReadError:
                more = False
            except ssl.SSLZeroReturnError:
                ended = True
            except ssl.SSLError as error:
                self._break(error)
                return
            if filled:
                self.inner.buffer_updated(filled)
            if ended:
                more = False
                if not self.inner.eof_received():
                    self.close()
        self._flush()

    def _flush(self) -> None:
        if self._out.pending and self._line is not None:
            self._line.write(self._out.read())

    def _say_end(self) -> None:
        if not self._open or self._line is None:
            return
        try:
            self._ssl.unwrap()
        except (ssl.SSLError, ValueError):
            pass  # It waits for the word of the peer, which nobody needs, or the peer has broken off.
        self._flush()

    def _break(self, error: ssl.SSLError) -> None:
        """The peer's records are of no use: what was sent to it, or came from it, was changed on the way; or a server
        does not take the certificate of this side, which it says behind the handshake.
        """
        why = None if self._name is None else refusal(error, self._cert)
        if why is not None:
            self._refused = CertificateRefused(why)
            self.abort()
            return
        limited.warning("tls_broken", "tls_broken peer=%s reason=%r", self._peer(), _reason(error))
        self._flush()
        self.abort()

    def _overdue(self) -> None:
        self._end_handshake(TimeoutError(f"no handshake within {HANDSHAKE_S:g} s"))
        self.abort()

    def _end_handshake(self, error: Exception | None) -> None:
        ended, self._ended = self._ended, None
        if self._limit is not None:
            self._limit.cancel()
            self._limit = None
        if ended is not None:
            ended(self, error)

    def _peer(self) -> str:
        address = self.get_extra_info("peername")
        return f"{address[0]}:{address[1]}" if isinstance(address, tuple) else "a peer"


class CertificateRefused(Exception):
    """A server does not take the certificate of this side, or wants one."""


class _NoTls(Exception):
    """The peer speaks, but not TLS."""


def channel_of(certificate: bytes) -> bytes:
    """What both ends of a connection know of the server's certificate (DER); "" when there is none."""
    return hashlib.sha256(certificate).digest() if certificate else b""


class Identity(NamedTuple):
    """A server's certificate as it is now."""

    context: ssl.SSLContext
    channel: bytes


class TlsGate:
    """The listening side: each connection gets the certificate that the files have now."""

    def __init__(self, tls: Tls) -> None:
        """Raises BadSetting when the files can't be used."""
        self._tls = tls
        self._seen = _seen_of(tls)
        self._identity = _identity(tls)
        self._opening: set[TlsEnd[asyncio.BufferedProtocol]] = set()

    def accept(self, inner: asyncio.BufferedProtocol) -> asyncio.BufferedProtocol:
        """The protocol of an accepted socket, for the one over it."""
        end = TlsEnd(inner, self._identity.context, self._ended, channel=self._identity.channel)
        self._opening.add(end)
        return end

    def look(self) -> None:
        """Read the files again if they have changed; files that can't be used leave what is known."""
        seen = _seen_of(self._tls)
        if seen == self._seen:
            return
        self._seen = seen
        try:
            self._identity = _identity(self._tls)
        except BadSetting as error:
            log.error("tls_unreadable path=%s reason=%r", self._tls.cert, error.message)
        else:
            log.info("tls_changed path=%s", self._tls.cert)

    def close(self) -> None:
        """End the connections whose handshake is under way."""
        for end in list(self._opening):
            end.abort()

    def _ended(self, end: TlsEnd[asyncio.BufferedProtocol], error: Exception | None) -> None:
        self._opening.discard(end)
        # One without TLS is refused by its protocol, which says so.
        if error is not None and not isinstance(error, ConnectionError | _NoTls):
            limited.warning("tls_refused", "tls_refused peer=%s reason=%r", end._peer(), self._why(error))

    def _why(self, error: Exception) -> str:
        """Why a handshake failed, and what helps."""
        reason, alert = _reason(error), error.reason if isinstance(error, ssl.SSLError) else ""
        if isinstance(error, ssl.SSLCertVerificationError) and error.verify_code in _NOT_SIGNED:
            return f"{reason}: no authority in {self._tls.client_ca} (tls_client_ca) has signed its certificate"
        if alert == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
            return f"{reason}, and tls_client_ca asks for one: {_GIVE}"
        if alert == _UNKNOWN_CA:
            what = f"it trusts no authority that has signed {self._tls.cert} (tls_cert)"
            return f"{reason}: {what}; give it that one as ca= of the address, DELAYD_TLS_CA, or tls_ca of a server"
        return reason


def check_files(tls: Tls) -> None:
    """Raise BadSetting when the files of a server can't be used."""
    _identity(tls)
    _dialling_context(tls)


def _identity(tls: Tls) -> Identity:
    context = _new_context(ssl.PROTOCOL_TLS_SERVER)
    # No connection is begun again from an earlier one, so nobody needs tickets for that.
    context.num_tickets = 0
    _load_own(context, tls)
    if tls.client_ca:
        _load_authorities(context, tls.client_ca, "tls_client_ca")
        context.verify_mode = ssl.CERT_REQUIRED
    try:
        with open(tls.cert, encoding="ascii", errors="replace") as file:
            text = file.read()
        begin, mark = text.index(ssl.PEM_HEADER), ssl.PEM_FOOTER
        certificate = ssl.PEM_cert_to_DER_cert(text[begin : text.index(mark, begin) + len(mark)])
    except (OSError, ValueError) as error:
        raise _bad("tls_cert", tls.cert, f"can't be read as PEM ({error})") from error
    return Identity(context, channel_of(certificate))


_contexts: dict[Tls, tuple[tuple[Seen, ...], ssl.SSLContext]] = {}


def dialling_context(tls: Tls) -> ssl.SSLContext:
    """The context of a side that dials; made anew when its files have changed. BadSetting when they can't be used."""
    seen = _seen_of(tls)
    known = _contexts.get(tls)
    if known is None or known[0] != seen:
        known = _contexts[tls] = seen, _dialling_context(tls)
    return known[1]


def _dialling_context(tls: Tls) -> ssl.SSLContext:
    context = _new_context(ssl.PROTOCOL_TLS_CLIENT)
    if tls.ca:
        _load_authorities(context, tls.ca, "tls_ca")
    else:
        context.load_default_certs(ssl.Purpose.SERVER_AUTH)
    if tls.cert:
        _load_own(context, tls)
    return context


def _new_context(protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
    return context


def _load_own(context: ssl.SSLContext, tls: Tls) -> None:
    _check_mode(tls.key)

    def password() -> bytes:
        raise _bad("tls_key", tls.key, "is encrypted, and nobody is there to type its password; store it without one")

    try:
        context.load_cert_chain(tls.cert, tls.key, password)
    except OSError as error:
        what = f"does not go with the key in {tls.key}, or one of the two is no PEM" if _is_ssl(error) else None
        raise _bad("tls_cert", tls.cert, f"{what or 'or its key can not be read'} ({_reason(error)})") from error


def _load_authorities(context: ssl.SSLContext, path: str, setting: str) -> None:
    try:
        context.load_verify_locations(path)
    except OSError as error:
        raise _bad(setting, path, f"holds no certificates of authorities in PEM ({_reason(error)})") from error


def _check_mode(path: str) -> None:
    try:
        mode = stat.S_IMODE(os.stat(path).st_mode)
    except OSError as error:
        raise _bad("tls_key", path, f"can't be read ({error.strerror})") from error
    if mode & 0o007:
        raise _bad("tls_key", path, f"has mode {mode:03o}, so everybody may read it; run `chmod 600 {path}`")


def _bad(setting: str, path: str, what: str) -> BadSetting:
    return BadSetting(f"{setting}: {path} {what}", setting=setting)


def _seen_of(tls: Tls) -> tuple[Seen, ...]:
    return tuple(_seen(path) for path in (tls.ca, tls.cert, tls.key, tls.client_ca))


def _seen(path: str) -> Seen:
    if not path:
        return NO_FILE
    try:
        found = os.stat(path)
    except OSError:
        return NO_FILE
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _is_ssl(error: OSError) -> bool:
    return isinstance(error, ssl.SSLError)


def _reason(error: Exception) -> str:
    """What OpenSSL says, without the place in its source."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message
    if isinstance(error, ssl.SSLError):
        return (error.reason or str(error)).lower().replace("_", " ")
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error)


_EXPIRED, _NOT_YET_VALID, _OTHER_NAME, _OTHER_ADDRESS = 10, 9, 62, 64  # X509_V_ERR_…, of OpenSSL's x509_vfy.h.


_NOT_SIGNED = (18, 19, 20, 21)  # Signed by itself, or by nobody who is known; of x509_vfy.h, too.
# OpenSSL's names of what a server says about the certificate of this side.
_UNKNOWN_CA = "TLSV1_ALERT_UNKNOWN_CA"
_UNUSABLE = (
    "SSLV3_ALERT_BAD_CERTIFICATE",
    "SSLV3_ALERT_CERTIFICATE_UNKNOWN",
    "SSLV3_ALERT_UNSUPPORTED_CERTIFICATE",
    "TLSV1_ALERT_DECRYPT_ERROR",
)
_GIVE = (
    "give one as cert= and key= of the address, as DELAYD_TLS_CERT and DELAYD_TLS_KEY, or as tls_cert and tls_key of a"
    " server"
)


def refusal(error: ssl.SSLError, cert: str) -> str | None:
    """What a server says about the certificate of this side, the file ``cert``, and what helps; None: nothing."""
    if error.reason == "TLSV13_ALERT_CERTIFICATE_REQUIRED":
        return (
            f"that server takes nobody without a certificate that an authority in its tls_client_ca has signed; {_GIVE}"
        )
    if error.reason == _UNKNOWN_CA:
        return (
            f"no authority in the tls_client_ca of that server has signed {cert}, the certificate of this side; have"
            f" its operator add the authority, or {_GIVE}"
        )
    if error.reason == "SSLV3_ALERT_CERTIFICATE_EXPIRED":
        return f"the certificate of this side, {cert}, has expired; put a new one into that file"
    if error.reason in _UNUSABLE:
        return f"that server can't use the certificate of this side, {cert}; see the log of that server"
    return None


def not_encrypted(endpoint: Endpoint, error: Exception) -> NotEncrypted:
    """The error of a side that has dialled, for a handshake that failed: it says who must act."""
    tls = endpoint.access.tls
    name = (tls.name if tls is not None else "") or endpoint.host
    if isinstance(error, _NoTls):
        what = "speaks no TLS; write delayd:// in place of delayds://, or have its operator set tls_cert and tls_key"
    elif isinstance(error, ssl.SSLCertVerificationError):
        if error.verify_code == _EXPIRED:
            what = (
                "has a certificate that has expired; its operator must put a new one into the file of tls_cert, which"
                " is read without a restart"
            )
        elif error.verify_code == _NOT_YET_VALID:
            what = "has a certificate that is not valid yet; look at the clocks of both machines"
        elif error.verify_code in (_OTHER_NAME, _OTHER_ADDRESS):
            what = (
                f"has a certificate for another name than {name}; connect to a name that it has, give that as name= of"
                " the address, or have a certificate made for this one"
            )
        else:
            trusted = f"no authority in {tls.ca}" if tls is not None and tls.ca else "none that this machine trusts"
            what = (
                f"has a certificate that nobody trusted here has signed: {trusted} ({error.verify_message}); give the"
                " certificate of its authority as ca= of the address, or as DELAYD_TLS_CA, or tls_ca of a server"
            )
    elif isinstance(error, ssl.SSLError) and (why := refusal(error, tls.cert if tls is not None else "")):
        what = f"ends the handshake: {why}"
    else:
        what = f"and this side can't agree on TLS ({_reason(error)}); see the log of that server"
    return NotEncrypted(f"{endpoint} {what}")
