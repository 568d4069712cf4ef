"""Load the Lua scripts: find the files, insert their includes and hash them."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import NamedTuple

from ..errors import ConfigurationError

__all__ = ["NAMES", "Script", "load"]

NAMES = ("claim", "takeover", "complete", "fail", "release", "renew", "checkpoint", "read", "survey")

_INCLUDE = re.compile(r"^-- include (lib/\w+\.lua)\n", re.MULTILINE)


class Script(NamedTuple):
    """A script as it is sent: EVALSHA with `sha`, or EVAL with `text` if the server does not have it cached."""

    name: str
    text: str
    sha: str


@cache
def load() -> Mapping[str, Script]:
    """Return every script by name, with its includes inserted.

    Raises:
        ConfigurationError: the files are missing from the installation.
    """
    root = _root()

    def fragment(match: re.Match[str]) -> str:
        return root.joinpath(match[1]).read_text("utf-8")

    scripts = {}
    for name in NAMES:
        text = _INCLUDE.sub(fragment, root.joinpath(f"{name}.lua").read_text("utf-8"))
        scripts[name] = Script(name, text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())
    return scripts


def _root() -> Traversable:
    """Return the folder with the Lua: inside the package in a wheel, beside it in a checkout or editable install."""
    checkout = Path(__file__).resolve().parents[2] / "lua"
    for root in (files("idemredis").joinpath("lua"), checkout):
        if root.joinpath("claim.lua").is_file():
            return root
    raise ConfigurationError(
        f"the Lua scripts are missing, both inside the package and at {checkout}; reinstall idemredis"
    )
