"""Transparency logs: trees of RFC 6962, and the texts of C2SP that carry them (docs/formats/proof.md).

    tree         SHA-256; a leaf is hashed behind a byte 0, two nodes behind a byte 1, and a node without a neighbour
                 moves up as it is
    signed note  a text, an empty line, and lines ``— NAME base64(key id, 4 B; signature)``
    checkpoint   a note of three lines: origin, size of the tree, root in base64
    cosignature  a witness's signature, with its instant, over the same text
    tlog-proof   extra data, the index of an entry, its path in the tree, an empty line, a checkpoint

Invariant: no I/O, and what is read here may come from anybody. So each text has one spelling only, sizes are bounded,
and what does not show what it should raises NotProved with a sentence. Ed25519 comes from the package `cryptography`,
which is imported when a signature is made or verified.
"""

import base64
import hashlib
import re
import struct
from collections.abc import Iterable, Iterator, Sequence
from types import ModuleType
from typing import NamedTuple

from delayd.errors import BadArgument, BadSetting

HASH_BYTES = 32
LEAF, NODE = b"\x00", b"\x01"  # So no leaf can be taken for a node (RFC 6962, section 2.1).
SIZE_MAX = (1 << 63) - 1
SIGNATURES_MAX = 64  # Of one note; C2SP asks for 16 at least.
PROOF_LINES_MAX = 63
TEXT_CHARACTERS_MAX = 1 << 20
ED25519, COSIGNATURE = 1, 4  # Kinds of keys: of a log, and of a witness.
SIGNATURE_BYTES = 64
KEY_ID_BYTES = 4
PROOF_LINE = "c2sp.org/tlog-proof@v1"
_DASH = "\N{EM DASH}"
_NUMBER = re.compile(r"0|[1-9][0-9]{0,18}")
_NAME = re.compile(r"[^\s+]+")
_VKEY = re.compile(r"([^\s+]+)\+([0-9a-f]{8})\+([A-Za-z0-9+/=]+)")
_SIGNATURE = re.compile(_DASH + r" ([^\s+]+) ([A-Za-z0-9+/=]+)")
_CONTROLS = re.compile(r"[\x00-\x09\x0b-\x1f]")
_NOT_UTF8 = re.compile("[\ud800-\udfff]")  # What Python makes of other bytes.
_INSTANT = struct.Struct(">Q")


class NotProved(Exception):
    """A proof, checkpoint, signature or key does not show what it should; the message is a sentence that says why."""


# Trees.


def leaf_hash(data: bytes) -> bytes:
    """The hash of an entry."""
    return hashlib.sha256(LEAF + data).digest()


def node_hash(left: bytes, right: bytes) -> bytes:
    """The hash of a node above two others."""
    return hashlib.sha256(NODE + left + right).digest()


class Tree:
    """The tree over hashes of leaves, with all levels in memory.

    The leaves may be nodes of one level of a larger tree: then this is the upper part of that one. An example with five
    leaves: the levels are ``0 1 2 3 4``, ``01 23 4``, ``0123 4`` and the root; the path of leaf 4 is ``0123`` alone.
    """

    __slots__ = ("_levels",)

    def __init__(self, leaves: Sequence[bytes]) -> None:
        level = list(leaves)
        self._levels = [level]
        sha256 = hashlib.sha256
        while len(level) > 1:
            above = [sha256(NODE + a + b).digest() for a, b in zip(level[::2], level[1::2], strict=False)]
            if len(level) % 2:
                above.append(level[-1])
            self._levels.append(above)
            level = above

    def __len__(self) -> int:
        return len(self._levels[0])

    @property
    def root(self) -> bytes:
        """The hash of the whole tree; that of nothing when it has no leaf."""
        return self._levels[-1][0] if len(self) else hashlib.sha256(b"").digest()

    def path(self, index: int) -> list[bytes]:
        """What proves the leaf ``index``: the neighbours of the nodes above it, from the leaf on."""
        assert 0 <= index < len(self), "only what is in the tree has a path"
        found = []
        for level in self._levels[:-1]:
            if index ^ 1 < len(level):
                found.append(level[index ^ 1])
            index >>= 1
        return found

    def consistency(self, old: int) -> list[bytes]:
        """What proves that this tree begins with the ``old`` leaves of an earlier one (RFC 6962, section 2.1.2)."""
        assert 0 <= old <= len(self), "an earlier tree is not larger"
        if old in (0, len(self)):
            return []
        return list(self._parts(old, 0, len(self), known=True))[::-1]

    def _parts(self, old: int, low: int, high: int, *, known: bool) -> Iterator[bytes]:
        """The parts of a proof for the leaves from ``low`` to ``high``, from the root down.

        ``known`` says that the verifier has the hash of these leaves if the earlier tree ends with them.
        """
        if old == high:
            if not known:
                yield self._node(low, high)
            return
        middle = low + (1 << (high - low - 1).bit_length() - 1)
        if old <= middle:
            yield self._node(middle, high)
            yield from self._parts(old, low, middle, known=known)
        else:
            yield self._node(low, middle)
            yield from self._parts(old, middle, high, known=False)

    def _node(self, low: int, high: int) -> bytes:
        level = (high - low - 1).bit_length()
        return self._levels[level][low >> level]


def root_of_path(leaf: bytes, index: int, size: int, path: Sequence[bytes]) -> bytes:
    """The root to which a path leads from a leaf (RFC 9162, section 2.1.3.2). NotProved when it does not fit."""
    if not 0 <= index < size:
        raise NotProved(f"entry {index} is not in a tree of {size}")
    place, last, found = index, size - 1, leaf
    for other in path:
        if not last:
            raise NotProved("the path is longer than the tree is high")
        if place & 1 or place == last:
            found = node_hash(other, found)
            place, last = _up_to_left(place, last)
        else:
            found = node_hash(found, other)
        place, last = place >> 1, last >> 1
    if last:
        raise NotProved("the path is shorter than the tree is high")
    return found


def check_consistency(old: tuple[int, bytes], new: tuple[int, bytes], proof: Sequence[bytes]) -> None:
    """Check that a tree begins with an earlier one; each is its size and its root (RFC 9162, section 2.1.4.2).

    Raises NotProved when it does not, or when the proof does not show it.
    """
    (old_size, old_root), (new_size, new_root) = old, new
    if old_size > new_size:
        raise NotProved(f"the earlier tree has {old_size} entries, and the later one only {new_size}")
    if old_size in (0, new_size):
        if proof:
            raise NotProved("the proof of consistency has lines, and these two trees need none")
        if old_size and old_root != new_root:
            raise NotProved(f"two roots are signed for the same {old_size} entries: the log has two histories")
        return
    parts = [*([old_root] if old_size & old_size - 1 == 0 else []), *proof]
    if not parts:
        raise NotProved("the proof of consistency is empty")
    place, last = old_size - 1, new_size - 1
    while place & 1:
        place, last = place >> 1, last >> 1
    older = newer = parts[0]
    for other in parts[1:]:
        if not last:
            raise NotProved("the proof of consistency is too long")
        if place & 1 or place == last:
            older, newer = node_hash(other, older), node_hash(other, newer)
            place, last = _up_to_left(place, last)
        else:
            newer = node_hash(newer, other)
        place, last = place >> 1, last >> 1
    if last:
        raise NotProved("the proof of consistency is too short")
    if (older, newer) != (old_root, new_root):
        raise NotProved(f"the tree of {new_size} entries does not begin with the {old_size} entries that were signed")


def _up_to_left(place: int, last: int) -> tuple[int, int]:
    """Pass the levels at which a node at the right edge has no neighbour and moves up as it is."""
    while place and not place & 1:
        place, last = place >> 1, last >> 1
    return place, last


# Keys and notes.


class Key(NamedTuple):
    """A public Ed25519 key by name, of a log or of a witness."""

    name: str
    kind: int  # ED25519 or COSIGNATURE.
    public: bytes

    @property
    def id(self) -> bytes:
        """The four bytes by which a signature names its key."""
        return hashlib.sha256(self.name.encode() + b"\n" + bytes((self.kind,)) + self.public).digest()[:KEY_ID_BYTES]

    @property
    def vkey(self) -> str:
        """The key as one word, which verifiers take."""
        return f"{self.name}+{self.id.hex()}+{to_base64(bytes((self.kind,)) + self.public)}"


def parse_key(vkey: str) -> Key:
    """Read a key that is one word. Raises BadArgument when it is none, or of another kind than Ed25519."""
    found = _VKEY.fullmatch(vkey.strip())
    try:
        packed = from_base64(found[3]) if found else b""
    except NotProved:
        packed = b""
    if found is None or len(packed) != 1 + HASH_BYTES or packed[0] not in (ED25519, COSIGNATURE):
        raise BadArgument(f"{vkey.strip()[:80]!r} is no Ed25519 key NAME+ID+KEY, as `delayd tree-head --key` prints it")
    key = Key(found[1], packed[0], packed[1:])
    if key.id.hex() != found[2]:
        raise BadArgument(f"the key of {key.name} has the id {key.id.hex()}, not {found[2]}: it was mistyped or cut")
    return key


class Signer(NamedTuple):
    """The private key of a log; its name is the log's origin."""

    name: str
    seed: bytes

    @property
    def key(self) -> Key:
        """Its public key."""
        public = _ed25519().Ed25519PrivateKey.from_private_bytes(self.seed).public_key().public_bytes_raw()
        return Key(self.name, ED25519, bytes(public))

    def sign(self, text: str) -> str:
        """Make the signed note of a text that ends with a line feed."""
        signature = _ed25519().Ed25519PrivateKey.from_private_bytes(self.seed).sign(text.encode())
        return f"{text}\n{_DASH} {self.name} {to_base64(self.key.id + bytes(signature))}\n"

    def encode(self) -> str:
        """The key as one word, as Go's package note writes it."""
        return f"PRIVATE+KEY+{self.name}+{self.key.id.hex()}+{to_base64(bytes((ED25519,)) + self.seed)}"


def parse_signer(text: str) -> Signer:
    """Read a private key. Raises BadSetting when it is none, without showing it."""
    words = text.strip().split("+", 4)
    try:
        packed = from_base64(words[4]) if len(words) == 5 else b""
    except NotProved:
        packed = b""
    if words[:2] != ["PRIVATE", "KEY"] or packed[:1] != bytes((ED25519,)) or len(packed) != 1 + HASH_BYTES:
        raise BadSetting("this is no private key of proofs, PRIVATE+KEY+NAME+ID+KEY; restore the file from a copy")
    signer = Signer(words[2], packed[1:])
    if signer.key.id.hex() != words[3]:
        raise BadSetting("the private key of proofs is damaged: its id is another one; restore the file from a copy")
    return signer


def check_origin(name: str) -> str:
    """An origin that may name a log and its key. Raises BadArgument when it has spaces or a plus, or is empty."""
    if not _NAME.fullmatch(name) or not name.isprintable() or len(name) > 200:
        raise BadArgument("an origin is one word of at most 200 characters without `+`, such as example.com/orders")
    return name


class NoteSignature(NamedTuple):
    """One line of a note's signatures."""

    name: str
    key_id: bytes
    signature: bytes

    @property
    def line(self) -> str:
        """The line, without its line feed."""
        return f"{_DASH} {self.name} {to_base64(self.key_id + self.signature)}"


class Checkpoint(NamedTuple):
    """What a log signs: the size and the root of its tree."""

    origin: str
    size: int
    root: bytes
    body: str  # What is signed.
    signatures: tuple[NoteSignature, ...]

    @property
    def head(self) -> tuple[int, bytes]:
        """Size and root."""
        return self.size, self.root

    @property
    def text(self) -> str:
        """The signed note."""
        return f"{self.body}\n" + "".join(f"{each.line}\n" for each in self.signatures)

    def check_signed(self, key: Key) -> None:
        """Check that the log's key has signed it. NotProved when it has not, or when the log is another one."""
        if key.name != self.origin:
            raise NotProved(f"it is of the log {self.origin}, and the key is of {key.name}")
        own = [each for each in self.signatures if (each.name, each.key_id) == (key.name, key.id)]
        if key.kind != ED25519 or not own:
            raise NotProved(f"it has no signature by the key {key.name}+{key.id.hex()}")
        if not all(_is_signed(key, each.signature, self.body) for each in own):
            raise NotProved(f"the signature of {key.name} is false: the checkpoint was changed, or the key is another")

    def cosigned_at_s(self, witness: Key) -> int:
        """The instant of a witness's cosignature, in seconds since the epoch. NotProved without a true one."""
        own = [each for each in self.signatures if (each.name, each.key_id) == (witness.name, witness.id)]
        if witness.kind != COSIGNATURE or not own:
            raise NotProved(f"it has no cosignature by the witness {witness.name}+{witness.id.hex()}")
        found = 0
        for each in own:
            if len(each.signature) != _INSTANT.size + SIGNATURE_BYTES:
                raise NotProved(f"the cosignature of {witness.name} has {len(each.signature)} bytes")
            (at_s,) = _INSTANT.unpack_from(each.signature)
            text = f"cosignature/v1\ntime {at_s}\n{self.body}"
            if at_s > SIZE_MAX or not _is_signed(witness, each.signature[_INSTANT.size :], text):
                raise NotProved(f"the cosignature of {witness.name} is false")
            found = max(found, at_s)
        return found


def checkpoint_body(origin: str, size: int, root: bytes) -> str:
    """The three lines that a log signs."""
    return f"{origin}\n{size}\n{to_base64(root)}\n"


def parse_checkpoint(text: str) -> Checkpoint:
    """Read a checkpoint, of which nothing is verified yet. NotProved when it is none."""
    check_text(text)
    body, middle, lines = text.rpartition("\n\n")
    fields = body.split("\n")
    if not middle or not lines.endswith("\n") or len(fields) < 3 or not all(fields):
        raise NotProved("this is no signed checkpoint: origin, size, root, an empty line, signatures")
    origin, size, root = fields[0], number_of(fields[1]), hash_of(fields[2])
    return Checkpoint(origin, size, root, f"{body}\n", tuple(parse_signatures(lines)))


def parse_signatures(text: str) -> list[NoteSignature]:
    """Read lines of signatures. NotProved when one is none, or when there are too many."""
    check_text(text)
    lines = text.split("\n")[:-1] if text.endswith("\n") else text.split("\n")
    if len(lines) > SIGNATURES_MAX:
        raise NotProved(f"a note has at most {SIGNATURES_MAX} signatures, not {len(lines)}")
    found = []
    for line in lines:
        match = _SIGNATURE.fullmatch(line)
        packed = from_base64(match[2]) if match else b""
        if match is None or len(packed) <= KEY_ID_BYTES:
            raise NotProved(f"{line[:80]!r} is no line of a signature")
        found.append(NoteSignature(match[1], packed[:KEY_ID_BYTES], packed[KEY_ID_BYTES:]))
    return found


def _is_signed(key: Key, signature: bytes, text: str) -> bool:
    made = _ed25519()
    from cryptography.exceptions import InvalidSignature

    try:
        made.Ed25519PublicKey.from_public_bytes(key.public).verify(signature, text.encode())
    except (InvalidSignature, ValueError):
        return False
    return True


def _ed25519() -> ModuleType:
    """What makes and verifies signatures. Raises BadSetting when it is not installed."""
    try:
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ModuleNotFoundError:
        raise BadSetting("signatures of proofs need cryptography: pip install 'delayd[proof]'") from None
    return ed25519


# Proofs.


class LogProof(NamedTuple):
    """A tlog-proof: an entry's place in the tree of a checkpoint, and data beside it that nothing here proves."""

    extra: bytes
    place: int  # The index of the entry, from 0.
    path: tuple[bytes, ...]
    checkpoint: Checkpoint

    @property
    def text(self) -> str:
        """The file."""
        lines = (PROOF_LINE, f"extra {to_base64(self.extra)}", f"index {self.place}", *map(to_base64, self.path), "")
        return "\n".join(lines) + f"\n{self.checkpoint.text}"

    def check(self, entry: bytes, key: Key) -> None:
        """Check that the log of a key has this entry at this place. NotProved when that is not shown."""
        self.checkpoint.check_signed(key)
        if root_of_path(leaf_hash(entry), self.place, self.checkpoint.size, self.path) != self.checkpoint.root:
            raise NotProved(
                f"entry {self.place} of the log is another one: it does not lead to the root that is signed"
            )


def parse_proof(text: str) -> LogProof:
    """Read a tlog-proof with extra data, of which nothing is verified yet. NotProved when it is none."""
    check_text(text)
    head, middle, checkpoint = text.partition("\n\n")
    first, *lines = head.split("\n")
    if first != PROOF_LINE or not middle or len(lines) < 2:
        raise NotProved(f"this is no proof: it does not begin with {PROOF_LINE}, or it was cut")
    extra, index, *path = lines
    if not extra.startswith("extra ") or not index.startswith("index "):
        raise NotProved("this is no proof of a message: it lacks the line `extra` or `index`")
    found = from_base64(extra.removeprefix("extra ")), number_of(index.removeprefix("index "))
    return LogProof(*found, _hashes_of(path), parse_checkpoint(checkpoint))


class Growth(NamedTuple):
    """What a witness is sent: a checkpoint, and the proof that its tree begins with an earlier one."""

    old_size: int
    path: tuple[bytes, ...]
    checkpoint: Checkpoint

    @property
    def text(self) -> str:
        """The body of the request ``add-checkpoint`` (C2SP tlog-witness)."""
        lines = (f"old {self.old_size}", *map(to_base64, self.path), "")
        return "\n".join(lines) + f"\n{self.checkpoint.text}"

    def check(self, old: Checkpoint, key: Key) -> None:
        """Check that the log of a key only grew since the checkpoint ``old``. NotProved when that is not shown."""
        old.check_signed(key)
        self.checkpoint.check_signed(key)
        if old.size != self.old_size:
            raise NotProved(f"it begins at {self.old_size} entries, and the earlier checkpoint has {old.size}")
        check_consistency(old.head, self.checkpoint.head, self.path)


def parse_growth(text: str) -> Growth:
    """Read a proof of consistency, of which nothing is verified yet. NotProved when it is none."""
    check_text(text)
    head, middle, checkpoint = text.partition("\n\n")
    first, *path = head.split("\n")
    if not first.startswith("old ") or not middle:
        raise NotProved("this is no proof of consistency: it does not begin with `old`, or it was cut")
    return Growth(number_of(first.removeprefix("old ")), _hashes_of(path), parse_checkpoint(checkpoint))


# Spellings.


def check_text(text: str) -> None:
    """NotProved when a text is larger than any proof, is no UTF-8, or has characters that a note must not have."""
    if len(text) > TEXT_CHARACTERS_MAX:
        raise NotProved(f"it has more than {TEXT_CHARACTERS_MAX:,} characters, and no proof has")
    if _NOT_UTF8.search(text):
        raise NotProved("it is not UTF-8, as proofs are")
    if found := _CONTROLS.search(text):
        raise NotProved(f"it has the character {ord(found[0]):#04x}, which no proof has")


def to_base64(data: bytes) -> str:
    """Standard base64."""
    return base64.b64encode(data).decode()


def from_base64(text: str) -> bytes:
    """The bytes of standard base64; NotProved for another spelling of them."""
    try:
        data = base64.b64decode(text, validate=True)
    except ValueError:
        data = b""
    if to_base64(data) != text:
        raise NotProved(f"{text[:80]!r} is not base64")
    return data


def hash_of(text: str) -> bytes:
    """The hash that a line has."""
    data = from_base64(text)
    if len(data) != HASH_BYTES:
        raise NotProved(f"{text[:80]!r} is not the base64 of a SHA-256")
    return data


def _hashes_of(lines: Iterable[str]) -> tuple[bytes, ...]:
    found = tuple(map(hash_of, lines))
    if len(found) > PROOF_LINES_MAX:
        raise NotProved(f"it has {len(found)} hashes, and no tree needs more than {PROOF_LINES_MAX}")
    return found


def number_of(text: str) -> int:
    """The number that a line has, in its one spelling."""
    if not _NUMBER.fullmatch(text) or int(text) > SIZE_MAX:
        raise NotProved(f"{text[:80]!r} is not a number")
    return int(text)
