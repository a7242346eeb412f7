"""The wire knows no torch, and its imports are quick enough for a command line."""

from __future__ import annotations

import pkgutil
import subprocess
import sys

import protocol

MODULES = sorted(f"protocol.{module.name}" for module in pkgutil.iter_modules(protocol.__path__))


def test_protocol_pulls_no_torch() -> None:
    code = (
        f"import sys, {', '.join(MODULES)}\n"
        "bad = {'torch', 'transformers', 'speculative', 'execution', 'psutil'} & set(sys.modules)\n"
        "assert not bad, bad\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert len(MODULES) >= 12
