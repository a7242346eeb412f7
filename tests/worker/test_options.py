"""What a run's configuration says of its workers reaches them: command line of a worker, its config, what it loads."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

import worker.cli
import worker.models
from orchestrator.config import RuntimeConfig
from orchestrator.peer import _arguments
from worker.cli import worker_command
from worker.config import WorkerConfig

RUN = RuntimeConfig(
    target_model="toy:", draft_model="toy:seed=2", target_dtype="bfloat16", target_threads=3, target_engine="torch",
    draft_engine="auto", weights="plain", graphs="off", kept_tokens=77, debug=True,
)  # fmt: skip


@pytest.mark.parametrize("role", ["target", "draft"])
def test_a_workers_command_line_says_all_of_it(role, monkeypatch):
    configs: list[WorkerConfig] = []
    monkeypatch.setattr(worker.cli, "run_worker", lambda config, load: configs.append(config) or 0)
    command = worker_command(role, "toy:", "", lambda config: pytest.fail("loaded"))
    for run in (RUN, RuntimeConfig()):
        arguments, _ = _arguments(role, "cpu", "ipc:///tmp/none", run)
        done = CliRunner().invoke(command, arguments)
        assert done.exit_code == 0, done.output
    config, default = configs
    assert (config.role, config.weights, config.graphs, config.kept_tokens, config.debug) == (
        role,
        "plain",
        "off",
        77,
        True,
    )
    expected = ("toy:", "bfloat16", 3, "torch") if role == "target" else ("toy:seed=2", "float32", 1, "auto")
    assert (config.model, config.dtype, config.threads, config.engine) == expected
    assert (default.weights, default.graphs, default.debug) == ("packed", "on", False)


@pytest.mark.parametrize("on", [True, False])
def test_what_is_loaded_is_what_the_config_says(on, monkeypatch):
    asked = {}
    monkeypatch.setattr(worker.models, "load", lambda model, **options: asked.update(options))
    config = WorkerConfig(
        "target", "m", "", weights="packed" if on else "plain", graphs="on" if on else "off", engine="torch"
    )
    worker.models.load_model(config)
    assert (asked["packed"], asked["graphs"], asked["engine"]) == (on, on, "torch")
