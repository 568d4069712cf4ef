"""The documents name what there is: files, links, settings, refusals."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from idemredis.web.contract import REFUSALS
from idemredis.web.settings import DEFAULTS, PREFIX

ROOT = Path(__file__).parent.parent
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]

each_document = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)


@each_document
def test_every_file_named_exists(document: Path) -> None:
    prose = re.sub(r"^```.*?^```$", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)
    named = re.findall(r"`((?:idemredis|lua|tests|examples|docs|\.ci)/[\w./-]*)`", prose)
    linked = [link for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", prose) if link]
    missing = [name for name in named if not (ROOT / name).exists()]
    missing += [link for link in linked if not (document.parent / link).exists()]

    assert not missing


@each_document
def test_every_setting_and_refusal_named_exists(document: Path) -> None:
    text = document.read_text()
    settings = {name for name in re.findall(rf"(?<![A-Z_]){PREFIX}([A-Z_]+)", text) if name != "URL"}
    refusals = set(re.findall(r"\bidempotency_(?:key|body|principal|length|row|response|unavailable)\w*", text))

    assert settings <= set(DEFAULTS)
    assert refusals <= set(REFUSALS)


@pytest.mark.parametrize("name", ["a script", "a setting", "an outcome"])
def test_contributing_says_how_to_add(name: str) -> None:
    section = (ROOT / "CONTRIBUTING.md").read_text().split(f"## {name.capitalize()}\n")[1].split("\n## ")[0]

    assert len(re.findall(r"^\| `", section, re.MULTILINE)) >= 5
