"""Every number of the wire in one place: the protocol's version and the limits that bound what a peer may send.

PROTOCOL.md states the same values and a test compares them. Imports nothing.
"""

from __future__ import annotations

from typing import Final

PROTOCOL_VERSION: Final = 3

MAX_FRAMES: Final = 8  # frames of one message, the header included
MAX_HEADER_BYTES: Final = 327_680  # frame 0; holds a chat template and what goes with it
MAX_ARRAY_BYTES: Final = 268_435_456  # any other frame: 64 rows of float32 over the largest vocabulary
MAX_NAME_BYTES: Final = 64  # UTF-8 bytes of an identifier: version, device, dtype, mode
MAX_TEXT_BYTES: Final = 4_096  # UTF-8 bytes of a model name or of a failure's text
MAX_TEMPLATE_BYTES: Final = 262_144  # UTF-8 bytes of a chat template
MAX_TOKENIZER_BYTES: Final = 67_108_864  # bytes of a tokenizer.json
MAX_NAMES: Final = 16  # entries in a list of names
MAX_EOS_IDS: Final = 64  # end-of-sequence ids of a model
MAX_GAMMA: Final = 64  # drafted tokens in a block
MAX_BRANCHES: Final = 128  # branches drafted behind a block in flight
MAX_LENGTH: Final = 1_048_576  # committed tokens of a request, its prompt included
MAX_VOCAB: Final = 1_048_576  # entries of a vocabulary
MAX_SUPPORT: Final = 4_096  # ids in one row of the counts codec
COUNTS_TOTAL: Final = 65_536  # what the counts of one row sum to

MAX_UINT32: Final = 2**32 - 1
MAX_UINT64: Final = 2**64 - 1
