"""The draft worker over its lives: present, gone, restarting. Requests ask for `peer` each round and may get None."""

from __future__ import annotations

import asyncio
import logging

from orchestrator.config import RuntimeConfig
from orchestrator.errors import SpecdecError, UsageError
from orchestrator.peer import LinkFactory, Peer
from orchestrator.places import Place
from protocol.errors import HandshakeError
from protocol.handshake import check_pair
from protocol.link import Link
from protocol.messages import Welcome

logger = logging.getLogger(__name__)
RESTART_DELAYS = (0.0, 1.0, 5.0, 20.0)  # seconds before each attempt; after the last, the draft is left out
STABLE_SECONDS = 60.0  # a worker that lived this long starts again from the first delay


class DraftPool:
    """Holds at most one draft peer, and brings it back when it dies. `restarts` counts the returns."""

    def __init__(self, config: RuntimeConfig, link: LinkFactory = Link) -> None:
        self._config = config
        self._link = link
        self._place: Place | None = config.draft_place
        self._keeper: asyncio.Task[None] | None = None
        self._peer: Peer | None = None
        self.timeout = config.draft_timeout
        self.restarts = 0

    @property
    def peer(self) -> Peer | None:
        """The draft worker, while it lives."""
        return self._peer if self._peer is not None and self._peer.alive else None

    async def start(self) -> None:
        """Start the first life; raises what is wrong with it. No-op for `--draft none`."""
        if self._place is not None:
            self._peer = await Peer.start("draft", self._place, self._config, self._link)

    def keep(self, target: Welcome) -> None:
        """Check that the pair matches (raises UsageError), and from now on bring the draft back when it's lost."""
        if self._peer is None:
            return
        check_vocabulary(target, self._peer.welcome)
        self._keeper = asyncio.create_task(self._keep(target), name="draft-keeper")

    async def close(self) -> None:
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        if self._peer is not None:
            await self._peer.close()

    async def _keep(self, target: Welcome) -> None:
        """Wait for the end of each life, and bring the next one about; give up on a draft that keeps dying."""
        clock = asyncio.get_running_loop().time
        attempts = 0
        while True:
            assert self._peer is not None
            born = clock()
            lost = await self._peer.lost
            logger.warning("%s; going on at γ = 0 while it is brought back", lost)
            await self._peer.close()
            attempts = 0 if clock() - born > STABLE_SECONDS else attempts
            back = False
            while not back:
                if attempts == len(RESTART_DELAYS):
                    logger.warning("the draft is left out: it was lost or failed to start %d times", attempts)
                    return
                await asyncio.sleep(RESTART_DELAYS[attempts])
                attempts += 1
                back = await self._bring_back(target)

    async def _bring_back(self, target: Welcome) -> bool:
        assert self._place is not None
        try:
            peer = await Peer.start("draft", self._place, self._config, self._link)
        except SpecdecError as error:
            logger.warning("the draft can't be brought back yet: %s", error)
            return False
        try:
            check_vocabulary(target, peer.welcome)
        except UsageError as error:
            logger.warning("the draft that came back is another one: %s", error)
            await peer.close()
            return False
        self._peer = peer
        self.restarts += 1
        logger.warning("the draft worker is back (restart %d)", self.restarts)
        return True


def check_vocabulary(target: Welcome, draft: Welcome) -> tuple[str, ...]:
    """Notes on a pair that matches; UsageError, naming both, for a draft whose ids mean other text."""
    try:
        return check_pair(target, draft).notes
    except HandshakeError as error:
        raise UsageError(str(error)) from error
