"""`python -m target_worker`: the same as `specdec-target-worker`."""

from target_worker.cli import main

main()
