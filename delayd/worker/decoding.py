"""Decoding: bodies, from bytes to what a handler takes. BadBody says that a body can't be decoded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import msgpack

from delayd.client.pulling.message import MessageView
from delayd.errors import BadBody, BadSetting

Decode = Literal["bytes", "json", "msgpack"] | Callable[[bytes], Any]
Decoder = Callable[[MessageView], Any]


def decoder_of(decode: Decode) -> Decoder:
    """The decoder that a handler asked for; BadSetting when there is none of that name."""
    if callable(decode):
        return _by(decode)
    named = _NAMED.get(str(decode))
    if named is None:
        raise BadSetting(f"decode is {decode!r} and must be 'bytes', 'json', 'msgpack' or a function of the bytes")
    return named


def _by(decode: Callable[[bytes], Any]) -> Decoder:
    def decoded(message: MessageView) -> Any:
        try:
            return decode(message.body)
        except Exception as error:
            raise BadBody(f"the body of {message!r} can't be decoded: {type(error).__name__}: {error}") from error

    return decoded


def _bytes(message: MessageView) -> bytes:
    return message.body


def _json(message: MessageView) -> Any:
    return message.json()


def _msgpack(message: MessageView) -> Any:
    try:
        return msgpack.unpackb(message.body)
    except ValueError as error:
        raise BadBody(f"the body of {message!r} is no msgpack: {type(error).__name__} {error}") from error


_NAMED: dict[str, Decoder] = {"bytes": _bytes, "json": _json, "msgpack": _msgpack}
