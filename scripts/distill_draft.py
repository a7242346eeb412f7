"""Make a draft for any target: the target writes its own corpus, a small student learns its distributions.

    python scripts/distill_draft.py --target HuggingFaceTB/SmolLM2-135M-Instruct --out my-draft

Both phases go on where they were when the same command is given again. The result is an ordinary checkpoint folder.
"""

from __future__ import annotations

import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch
from distill.corpus import Corpus, CorpusSpec, next_chapter, open_folder, shard_folders
from distill.evaluate import Score, evaluate, step_milliseconds
from distill.faults import RunFault, UsageFault
from distill.progress import Reporter
from distill.student import Shape, Student, build_student, check_shape, likeliest, save_student
from distill.target import Target, load_target
from distill.train import Course, Trainer, working_dtype
from distill.writer import Recipe, Writer, write_corpus


@dataclass(frozen=True)
class Plan:
    """Everything that the command line says."""

    target: str
    out: Path
    work: Path
    device: torch.device
    shape: Shape
    recipe: Recipe
    course: Course
    length: int
    top: int
    corpus_tokens: int
    corpus_minutes: float | None
    seed: int


class Stop:
    """Set by ^C or SIGTERM while entered; the phases ask it between steps, save, and leave."""

    def __init__(self) -> None:
        self.asked = False
        self.earlier: dict[int, Any] = {}

    def __enter__(self) -> Stop:
        self.earlier = {number: signal.signal(number, self._ask) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.earlier.items():
            signal.signal(number, handler)

    def _ask(self, *_: object) -> None:
        if self.asked:
            raise KeyboardInterrupt  # the second one does not wait
        self.asked = True


def fill_corpus(plan: Plan, stop: Stop) -> None:
    """Let the target write until the corpus holds what the plan asks for."""
    folder = plan.work / "corpus"
    done = Corpus(folder).tokens if shard_folders(folder) else 0
    if done >= plan.corpus_tokens:
        return
    target = load_target(plan.target, working_dtype(plan.device), plan.device)
    check_shape(plan.shape, target.model.config.get_text_config())
    spec = CorpusSpec(plan.target, target.vocab_size, plan.length, min(plan.top, target.vocab_size), plan.seed)
    open_folder(folder, spec)
    began = time.monotonic()
    with Reporter("corpus") as reporter:

        def late() -> bool:
            limit = plan.corpus_minutes
            return stop.asked or (limit is not None and time.monotonic() - began > 60 * limit)

        def report(count: int) -> None:
            rate = (count - done) / max(1e-9, time.monotonic() - began)
            reporter.update(count / plan.corpus_tokens, f"{count:,} tokens, {rate:.0f} tokens/s")

        with torch.inference_mode():
            writer = Writer(target, spec, plan.recipe, next_chapter(folder))
            count = write_corpus(writer, folder, plan.corpus_tokens, done, late, report)
        reporter.say(f"{count:,} tokens in {folder}")


def train(plan: Plan, target: Target, corpus: Corpus, stop: Stop) -> tuple[Student, Trainer, bool]:
    """Train from the start or from the saved state; the last value says whether the course is over."""
    file = plan.work / "training.pt"
    head_ids = Trainer.saved_head(file)
    if plan.shape.head and (head_ids is None or len(head_ids) != plan.shape.head):
        head_ids = likeliest(corpus.mass(target.vocab_size), plan.shape.head)
    student = build_student(target.model, plan.shape, head_ids)
    student.causal.to(plan.device)
    with Reporter("training") as reporter:
        trainer = Trainer(student, corpus, plan.course, file)
        if trainer.resume():
            reporter.say(f"resumed at step {trainer.step}, {100 * trainer.progress:.0f} % of the course")

        def report(now: Trainer) -> None:
            rate = now.tokens / max(1e-9, now.seconds)
            text = f"step {now.step}, epoch {now.epoch + 1}, α {now.overlap:.3f} in training, {rate:.0f} tokens/s"
            reporter.update(now.progress, text)

        over = trainer.run(lambda: stop.asked, report)
    student.causal.eval()
    return student, trainer, over


def describe(plan: Plan, trainer: Trainer, corpus: Corpus, score: Score, milliseconds: float | None) -> dict[str, Any]:
    """What config.json tells about the training."""
    return {
        "target": plan.target,
        "corpus_tokens": corpus.tokens,
        "corpus_chats": len(corpus.training),
        "steps": trainer.step,
        "trained_tokens": trainer.tokens,
        "epochs": round(trainer.epoch + trainer.index / max(1, trainer.batches), 2),
        "minutes": round(trainer.seconds / 60, 1),
        "training_alpha": round(trainer.overlap, 4),
        "held_out": score.rounded(),
        "held_out_chats": len(corpus.held_out),
        "step_milliseconds": milliseconds and round(milliseconds, 2),
    }


def distill(plan: Plan, stop: Stop) -> None:
    """The whole way: corpus, training, evaluation, checkpoint."""
    check_folders(plan)
    fill_corpus(plan, stop)
    leave_if(stop.asked, "the corpus is kept")
    corpus = Corpus(plan.work / "corpus")
    target = load_target(plan.target, torch.float32, plan.device)
    student, trainer, over = train(plan, target, corpus, stop)
    leave_if(not over, "the training state is kept")
    with Reporter("evaluation") as reporter:
        score = evaluate(target.model, student, corpus)
        milliseconds = step_milliseconds(student) if plan.device.type == "cpu" else None
        reporter.say(score.sentence() + (f"; a draft step takes {milliseconds:.1f} ms" if milliseconds else ""))
        said = describe(plan, trainer, corpus, score, milliseconds)
        size = save_student(student, plan.out, plan.target, target.tokenizer, said)
        reporter.say(f"wrote {plan.out}, {size:,} bytes")


def leave_if(interrupted: bool, kept: str) -> None:
    if interrupted:
        raise RunFault(f"interrupted; {kept}, give the same command to go on")


def check_folders(plan: Plan) -> None:
    """Find out before hours of work whether their result can be written."""
    for folder in (plan.work, plan.out.parent):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            probe = folder / ".distill-probe"
            probe.write_text("")
            probe.unlink()
        except OSError as error:
            raise UsageFault(f"cannot write to {folder}: {error.strerror or error} (choose another folder)") from error
    if plan.out.exists() and not (plan.out / "config.json").exists() and any(plan.out.iterdir()):
        raise UsageFault(f"{plan.out} is not empty and holds no checkpoint: choose another --out")


class Head(click.ParamType):  # type: ignore[type-arg]
    """`full`, or the number of ids that the draft can propose; full is 0."""

    name = "full|N"

    def convert(self, value: Any, param: click.Parameter | None, context: click.Context | None) -> int:
        if value == "full" or value == 0:
            return 0
        if not str(value).isdigit() or int(value) < 2:
            self.fail(f"{value!r} is neither 'full' nor a number of ids from 2 up", param, context)
        return int(value)


POSITIVE = click.IntRange(min=1)


@click.command(context_settings={"max_content_width": 110, "show_default": True})
@click.option("--target", required=True, help="Hugging Face id, model folder or .gguf file.")
@click.option("--out", required=True, type=click.Path(path_type=Path, file_okay=False), help="Checkpoint folder.")
@click.option("--work", type=click.Path(path_type=Path, file_okay=False), help="Corpus and state.  [default: OUT.work]")
@click.option("--layers", default=3, type=POSITIVE, help="Layers of the draft, spread evenly over the target's.")
@click.option("--head", default="full", type=Head(), help="Ids that the draft can propose: all, or the N likeliest.")
@click.option("--embedding", default="own", type=click.Choice(["own", "shared"]), help="shared: not in the checkpoint.")
@click.option("--corpus-tokens", default=1_000_000, type=click.IntRange(min=0), help="Size of the corpus.")
@click.option("--corpus-minutes", type=click.FloatRange(min=0), help="Stop writing the corpus after this time.")
@click.option("--length", default=320, type=click.IntRange(min=32), help="Longest chat, in tokens.")
@click.option("--rows", default=192, type=POSITIVE, help="Chats written at once.")
@click.option("--minutes", default=60.0, type=click.FloatRange(min=0), help="Training time; the schedule fits into it.")
@click.option("--steps", type=POSITIVE, help="Train this many steps instead of --minutes.")
@click.option("--learning-rate", default=1.5e-3, type=click.FloatRange(min=0, min_open=True), help="At its peak.")
@click.option("--batch-tokens", default=2048, type=click.IntRange(min=64), help="Tokens of a training step.")
@click.option("--threads", type=POSITIVE, help="CPU threads.  [default: all cores]")
@click.option("--device", default="cpu", help="cpu, cuda:0, mps …")
@click.option("--seed", default=0, type=click.IntRange(min=0), help="Of the corpus and of the order of training.")
def main(**options: Any) -> None:
    """Distil a draft model from a target."""
    if options["threads"]:
        torch.set_num_threads(options["threads"])
    try:
        with Stop() as stop:
            distill(plan_of(options), stop)
    except UsageFault as fault:
        click.echo(f"error: {fault}", err=True)
        sys.exit(2)
    except RunFault as fault:
        click.echo(f"error: {fault}", err=True)
        sys.exit(1)


def plan_of(options: dict[str, Any]) -> Plan:
    """Turn the parsed options into a Plan."""
    try:
        device = torch.device(options["device"])
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        said = str(error).splitlines()[0]
        raise UsageFault(f"device {options['device']!r} is not usable: {said} (try --device cpu)") from error
    out: Path = options["out"].expanduser().absolute()
    return Plan(
        target=options["target"],
        out=out,
        work=(options["work"] or out.with_name(out.name + ".work")).expanduser().absolute(),
        device=device,
        shape=Shape(options["layers"], options["head"], options["embedding"] == "shared"),
        recipe=Recipe(rows=options["rows"]),
        course=Course(
            minutes=None if options["steps"] else options["minutes"],
            steps=options["steps"],
            learning_rate=options["learning_rate"],
            batch_tokens=options["batch_tokens"],
            seed=options["seed"],
        ),
        length=options["length"],
        top=64,
        corpus_tokens=options["corpus_tokens"],
        corpus_minutes=options["corpus_minutes"],
        seed=options["seed"],
    )


if __name__ == "__main__":
    main()
