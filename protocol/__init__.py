"""The wire: messages, codecs of q̃, handshake, sockets. PROTOCOL.md beside this file is the specification. Never torch."""

from __future__ import annotations
