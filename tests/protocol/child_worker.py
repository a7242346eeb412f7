"""A worker as a process of its own, for tests that kill it: python child_worker.py ADDRESS. Never answers Verify."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from protocol.endpoint import Endpoint
from protocol.messages import Verify
from tests.protocol.support import answer, welcome


def main() -> None:
    with Endpoint(sys.argv[1]) as endpoint:
        endpoint.status.update(state="ready")
        while not endpoint.stopping.is_set():
            for peer, message in endpoint.receive(None):
                reply = None if isinstance(message, Verify) else answer(message, welcome("target"))
                if reply is not None:
                    endpoint.send(peer, reply)


if __name__ == "__main__":
    main()
