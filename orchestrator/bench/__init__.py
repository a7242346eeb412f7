"""The command `bench`: target-only and speculative decoding in turn, in the same processes, and what a round cost.

Reads the rounds that a Runtime records and imports no worker. Everything heavy is imported when the command runs.
"""
