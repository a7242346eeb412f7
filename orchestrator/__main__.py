"""`python -m orchestrator`: the same as `specdec-orchestrator`."""

from orchestrator.cli import main

main()
