"""The client worth copying, against the extension, with a proxy in between that loses things."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
