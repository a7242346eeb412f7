"""What the tests of the orchestrator's parts share: imports from the repository's root."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # so that `tests.` is found from anywhere
