"""Folders of the cache appear whole or not at all, and are made once by any number of processes."""

from __future__ import annotations

import subprocess
import sys

import pytest

from execution.cache_folder import cache_folder, content_key, made_once, need_space, sha256_of
from execution.errors import ModelError

PROGRAM = """
import os, sys, time
from execution.cache_folder import made_once
def make(folder):
    (folder / "half").write_text("1")
    time.sleep(0.5)
    (folder / "whole").write_text(str(os.getpid()))
    with open(sys.argv[1], "a") as log:
        log.write("made\\n")
folder = made_once("models/thing", make)
assert (folder / "half").exists()
print((folder / "whole").read_text())
"""


def test_two_processes_make_it_once(cache, tmp_path):
    log = tmp_path / "log"
    command = [sys.executable, "-c", PROGRAM, str(log)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    makers = {process.communicate(timeout=60)[0] for process in processes}
    assert all(process.returncode == 0 for process in processes)
    assert len(makers) == 1 and log.read_text() == "made\n"
    assert sorted(path.name for path in (cache / "models").iterdir()) == ["thing", "thing.lock"]


def test_a_failure_leaves_nothing_and_may_be_repeated(cache):
    def fail(folder):
        (folder / "half").write_text("1")
        raise ModelError("no")

    with pytest.raises(ModelError, match="no"):
        made_once("models/thing", fail)
    assert [path.name for path in (cache / "models").iterdir()] == ["thing.lock"]
    assert (made_once("models/thing", lambda folder: (folder / "a").touch() or None) / "a").exists()


def test_a_killed_maker_leaves_nothing_that_is_taken_for_whole(cache, tmp_path):
    killed = PROGRAM.replace("time.sleep(0.5)", "os._exit(9)")
    assert subprocess.run([sys.executable, "-c", killed, str(tmp_path / "log")], timeout=60).returncode == 9
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path / "log")], timeout=60)
    assert done.returncode == 0


def test_where_it_is(cache, monkeypatch, tmp_path):
    assert cache_folder() == cache
    monkeypatch.delenv("SPECDEC_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    if sys.platform == "linux":
        assert cache_folder() == tmp_path / "xdg" / "specdec"


def test_a_folder_that_cannot_be_written_is_one_clear_line(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match=r"cannot be written .* SPECDEC_CACHE"):
        made_once("models/thing", lambda folder: None)


def test_content_key_follows_the_content(cache, tmp_path):
    path = tmp_path / "weights"
    path.write_bytes(b"one")
    assert content_key(path) == content_key(path) == sha256_of(path)
    path.write_bytes(b"three")
    assert content_key(path) == sha256_of(path)


def test_full_disk_is_said_beforehand(cache):
    with pytest.raises(ModelError, match=r"needs .* GB"):
        need_space(10**18, "dequantising x")
