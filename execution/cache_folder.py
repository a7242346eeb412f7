"""The user's cache: folders that appear whole or not at all, made once even when two workers start together.

Imports nothing heavy and nothing of ours but the errors.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from execution.errors import ModelError


def cache_folder() -> Path:
    """`SPECDEC_CACHE`, or `specdec` in the platform's folder for caches (`XDG_CACHE_HOME`, ~/.cache on Linux)."""
    named = os.environ.get("SPECDEC_CACHE")
    if named:
        return Path(named).expanduser()
    from platformdirs import user_cache_path

    return Path(user_cache_path("specdec", appauthor=False))


def made_once(name: str, make: Callable[[Path], None]) -> Path:
    """The folder `name` of the cache; if it is not there, `make` fills an empty one that then takes its place.

    A second process waits for the first and finds its work. What `make` raises leaves nothing behind.
    """
    from filelock import FileLock

    folder = cache_folder() / name
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder.with_name(folder.name + ".lock"))
        with lock:
            if folder.is_dir():
                return folder
            draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
            try:
                make(draft)
                draft.chmod(0o755)
                draft.rename(folder)
            finally:
                shutil.rmtree(draft, ignore_errors=True)
    except OSError as error:
        raise ModelError(
            f"cache folder {str(cache_folder())!r} cannot be written ({error}): free space there, or name another one"
            " in SPECDEC_CACHE"
        ) from error
    return folder


def need_space(bytes_needed: int, purpose: str) -> None:
    """ModelError unless the cache's disk has room."""
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if free < bytes_needed:
        raise ModelError(
            f"{purpose} needs {bytes_needed / 1e9:.1f} GB in {str(folder)!r}, {free / 1e9:.1f} GB are free: free space"
            " there, or name another folder in SPECDEC_CACHE"
        )


def sha256_of(path: Path) -> str:
    """Hex digest of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def content_key(path: Path) -> str:
    """`sha256_of`, remembered in the cache by path, size and time of change: large files are read once."""
    status = path.stat()
    stamp = [str(path.resolve()), status.st_size, status.st_mtime_ns]
    name = hashlib.sha256(json.dumps(stamp).encode()).hexdigest()[:32]

    def make(folder: Path) -> None:
        (folder / "sha256").write_text(sha256_of(path))

    return (made_once(f"hashes/{name}", make) / "sha256").read_text()
