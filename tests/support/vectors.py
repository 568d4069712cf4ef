"""Requests and the fingerprints that they must have."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

__all__ = ["VECTORS", "body_of"]

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "fingerprints.json").read_text())


def body_of(vector: dict[str, Any]) -> bytes:
    if "body_repeat" in vector:
        text, times = vector["body_repeat"]
        return text.encode() * int(times)  # type: ignore[no-any-return]
    return base64.b64decode(vector["body_base64"])


# Fingerprints
