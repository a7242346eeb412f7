"""`python -m draft_worker`: the same as `specdec-draft-worker`."""

from draft_worker.cli import main

main()
