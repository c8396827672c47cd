"""Write docs/openapi.json from the models. A test holds it current."""

from __future__ import annotations

import json
from pathlib import Path

from onceborn.surfaces.rest.openapi import document

TARGET = Path(__file__).resolve().parent.parent / "docs" / "openapi.json"


def rendered() -> str:
    """The document as the file has it."""
    return json.dumps(document(), indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    TARGET.write_text(rendered(), encoding="utf-8")
