"""`specdec-target-worker`."""

from __future__ import annotations

from worker.cli import worker_command
from worker.config import WorkerConfig
from worker.process import Served

MODEL_HELP = "smollm2-135m-instruct, a Hugging Face id, a local folder, a .gguf file, synthetic:… or toy:…"


def _load(config: WorkerConfig) -> Served:
    from target_worker.engine import TargetEngine  # torch, only once the address is bound
    from worker.models import load_model, served_model

    executor, vocabulary = load_model(config)
    engine = TargetEngine(executor, config.kept_tokens)
    engine.warm_up()
    return served_model(engine, executor, vocabulary)


main = worker_command("target", "smollm2-135m-instruct", MODEL_HELP, _load)
