"""The wire: messages, codecs of q̃, handshake, sockets. Never torch.

PROTOCOL.md beside this file is the specification.
"""

from __future__ import annotations
