"""`specdec-draft-worker`."""

from __future__ import annotations

from worker.cli import worker_command
from worker.config import WorkerConfig
from worker.process import Served

MODEL_HELP = (
    "smollm2-135m-draft, ngram (prompt lookup, no model), a Hugging Face id, a local folder, a .gguf file, "
    "synthetic:… or toy:…"
)


def _load(config: WorkerConfig) -> Served:
    if config.model == "ngram":
        from draft_worker.ngram import served_ngram  # no torch: prompt lookup starts at once

        return served_ngram()
    from draft_worker.engine import ModelDraftEngine
    from worker.models import load_model, served_model

    executor, vocabulary = load_model(config)
    engine = ModelDraftEngine(executor, config.kept_tokens)
    engine.warm_up()
    return served_model(engine, executor, vocabulary)


main = worker_command("draft", "smollm2-135m-draft", MODEL_HELP, _load)
