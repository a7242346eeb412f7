"""The mathematics of lossless speculative decoding. Imports torch and nothing of ours."""

from __future__ import annotations

from speculative.acceptance import acceptance_rate, residual_distribution, total_variation
from speculative.batch_verify import Outcome, verify_coupled, verify_greedy, verify_rejection
from speculative.decode import Round, speculative_decode
from speculative.gpt import GPTModel, model_step
from speculative.noise import Stream, gumbel, integers16, philox4x32, random_words, uniform
from speculative.propose import draw_coupled, draw_dense, draw_greedy
from speculative.racing import race
from speculative.sampling import SamplingOptions, log_distribution
from speculative.theory import SpeedupPoint, demonstrate_speculative, expected_accepted_tokens, speculative_speedup
from speculative.verify import pad_distribution, speculative_verify

__all__ = [
    "GPTModel",
    "Outcome",
    "Round",
    "SamplingOptions",
    "SpeedupPoint",
    "Stream",
    "acceptance_rate",
    "demonstrate_speculative",
    "draw_coupled",
    "draw_dense",
    "draw_greedy",
    "expected_accepted_tokens",
    "gumbel",
    "integers16",
    "log_distribution",
    "model_step",
    "pad_distribution",
    "philox4x32",
    "race",
    "random_words",
    "residual_distribution",
    "speculative_decode",
    "speculative_speedup",
    "speculative_verify",
    "total_variation",
    "uniform",
    "verify_coupled",
    "verify_greedy",
    "verify_rejection",
]
