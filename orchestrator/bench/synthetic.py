"""`--synthetic "target=30ms draft=3ms alpha=0.8"`: devices that wait for the stated time, over a link of that kind.

Models of that kind are execution/synthetic.py's; this file only writes their references.
"""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass

from orchestrator.config import RuntimeConfig
from orchestrator.emulated_link import LinkShape
from orchestrator.errors import UsageError

TIME_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6}
RATE_UNITS = {"kbps": 1e3, "Mbps": 1e6, "Gbps": 1e9}
MAX_VOCAB = 65536  # execution.synthetic_spec's, as are the other limits: told here before a worker starts
_NUMBER = r"[0-9]+\.?[0-9]*(?:e[-+]?[0-9]+)?|\.[0-9]+"
_QUANTITY = re.compile(rf"({_NUMBER})\s*([A-Za-zµ]*)")
_MODEL_FIELDS = ("target_model", "draft_model", "target", "draft", "target_dtype", "draft_dtype")


@dataclass(frozen=True)
class Synthetic:
    """Seconds, bits a second; `entropy` of p in nats. The defaults are those of the flag."""

    target: float = 0.030  # a target pass of one token
    draft: float = 0.003  # a draft step
    alpha: float = 0.8
    rtt: float = 0.0  # to the draft and back
    vocab: int = 4096
    bandwidth: float = 1e9  # to the draft, each way
    entropy: float = 2.7
    seed: int = 0
    token: float = 0.0  # more time of the target for each token fed in a pass beyond the first

    def __post_init__(self) -> None:
        for name in ("target", "draft", "bandwidth"):
            if not getattr(self, name) > 0:
                raise UsageError(f"--synthetic {name} must be more than 0")
        if not 2 <= self.vocab <= MAX_VOCAB:
            raise UsageError(f"--synthetic vocab={self.vocab} is out of range: expected 2 to {MAX_VOCAB}")
        least, most = 2 / self.vocab, math.log(self.vocab)
        if not least <= self.alpha <= 1:
            raise UsageError(f"--synthetic alpha={self.alpha:g} is out of range: expected 2/vocab = {least:.2g} to 1")
        if not 0 < self.entropy <= most:
            raise UsageError(
                f"--synthetic entropy={self.entropy:g} is out of range: expected more than 0, at most "
                f"ln(vocab) = {most:.2f}"
            )

    @property
    def link(self) -> LinkShape:
        """The link to the draft."""
        return LinkShape(self.rtt, self.bandwidth / 8)

    def references(self) -> tuple[str, str]:
        """The models' references, target and draft."""
        common = f"vocab={self.vocab},entropy={self.entropy:g},seed={self.seed}"
        token = f",token_ms={self.token * 1e3:g}" if self.token else ""
        return (
            f"synthetic:step_ms={self.target * 1e3:g},{common}{token}",
            f"synthetic:step_ms={self.draft * 1e3:g},{common},alpha={self.alpha:g}",
        )

    def configure(self, config: RuntimeConfig) -> RuntimeConfig:
        """`config` with both models replaced. UsageError where it names models or places of its own."""
        default = RuntimeConfig()
        named = [name for name in _MODEL_FIELDS if getattr(config, name) != getattr(default, name)]
        if named:
            flags = ", ".join(f"--{name.replace('_', '-')}" for name in named)
            raise UsageError(f"--synthetic brings both models and where they run: leave out {flags}")
        target, draft = self.references()
        return dataclasses.replace(config, target_model=target, draft_model=draft, target_threads=1, draft_threads=1)


def parse_synthetic(text: str) -> Synthetic:
    """Parse `key=value` pairs with blanks or commas between them. UsageError names the key, and what it may be."""
    known = {field.name: field for field in dataclasses.fields(Synthetic)}
    values: dict[str, float | int] = {}
    for pair in text.replace(",", " ").split():
        key, equals, value = pair.partition("=")
        if not equals or key not in known:
            raise UsageError(f"--synthetic {pair!r} is unknown: expected KEY=VALUE with KEY of {', '.join(known)}")
        if key in values:
            raise UsageError(f"--synthetic names {key} twice")
        values[key] = _value(key, value)
    return Synthetic(**values)  # type: ignore[arg-type]  # `_value` gives whole numbers where they belong


def _value(key: str, text: str) -> float | int:
    if key in ("vocab", "seed"):
        if not re.fullmatch(r"[0-9]{1,9}", text):
            raise UsageError(f"--synthetic {key}={text}: expected a whole number")
        return int(text)
    match = _QUANTITY.fullmatch(text)
    units = (
        TIME_UNITS if key in ("target", "draft", "rtt", "token") else RATE_UNITS if key == "bandwidth" else {"": 1.0}
    )
    example = {"bandwidth": "1Gbps", "alpha": "0.8", "entropy": "2.7"}.get(key, "3ms")
    if match is None:
        raise UsageError(f"--synthetic {key}={text}: expected a number, such as {key}={example}")
    number, unit = float(match[1]), match[2]
    if number == 0 and not unit:
        return 0.0  # nothing is nothing in any unit
    if unit not in units:
        expected = f"a unit of {', '.join(units)}" if "" not in units else "no unit"
        raise UsageError(f"--synthetic {key}={text}: expected {expected}, such as {key}={example}")
    return number * units[unit]
