"""What a call looks like on the wire."""

from __future__ import annotations

from typing import Any

import pytest
import redis

from idemredis.core.operations import Call
from idemredis.core.scripts import load
from idemredis.store.evaluate import encode_call

CLAIM = load()["claim"]
WORDS = {
    "text": "charge",
    "empty": "",
    "number": 86_400_000,
    "negative": -1,
    "umlaut": "Übergröße",
    "emoji": "POST /🎉/<id>",
    "text of bytes": b"{}",
    "no text": bytes(range(256)),
    "UTF-8": "größer".encode(),
    "255": "x" * 255,
    "256": "x" * 256,
    "1023": b"x" * 1023,
    "1024": b"x" * 1024,
    "large": b"\xff" * 100_000,
    "long name": "ß" * 600,
}


@pytest.mark.parametrize("by_text", [False, True])
@pytest.mark.parametrize("word", WORDS.values(), ids=WORDS)
def test_a_call_is_encoded_as_redis_py_encodes_it(word: str | bytes | int, by_text: bool) -> None:
    call: Call[Any] = Call("claim", "idem:acct_1:key-1", "token", ("first", word, 7), lambda reply, sent: None)
    command = ("EVAL", CLAIM.text) if by_text else ("EVALSHA", CLAIM.sha)
    connection: Any = redis.Connection  # without types
    packed = connection().pack_command(*command, 1, call.row, *call.args)
    assert encode_call(CLAIM, call, by_text) == b"".join(packed)
