"""A loaded model as a worker serves it: the bridge from execution to what goes over the wire."""

from __future__ import annotations

from execution.interface import Executor
from execution.loading import ModelError, load
from execution.vocabulary import Vocabulary
from protocol.handshake import vocabulary_fingerprint
from protocol.messages import TokenizerReply
from worker.config import WorkerConfig
from worker.loop import Engine
from worker.process import Served, WorkerError


def load_model(config: WorkerConfig) -> tuple[Executor, Vocabulary]:
    """Load what the command line names; WorkerError with one clear line where that can't be."""
    try:
        return load(
            config.model,
            device=config.device,
            dtype=config.dtype,
            threads=config.threads,
            packed=config.weights == "packed",
            engine=config.engine,
            graphs=config.graphs == "on",
        )
    except ModelError as error:
        raise WorkerError(str(error), usage=error.usage) from error


def served_model(engine: Engine, executor: Executor, vocabulary: Vocabulary) -> Served:
    """What the handshake says of a model: both verify modes and every codec go with it."""
    return Served(
        engine=engine,
        model=executor.model,
        source="model",
        vocab_size=executor.vocab_size,
        vocabulary=vocabulary_fingerprint(vocabulary.pairs),
        context_length=executor.context_length,
        eos_ids=vocabulary.eos_ids,
        verify_modes=("rejection", "coupled"),
        codecs=("none", "counts", "dense"),
        tokenizer=TokenizerReply(vocabulary.tokenizer_json, vocabulary.chat_template),
    )
