"""Distilling a draft from a target: corpus, student, training, evaluation. Driven by scripts/distill_draft.py."""
