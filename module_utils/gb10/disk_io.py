"""Reading and writing large files once, without the page cache or ahead of need."""

from __future__ import annotations

# The kernel cuts what one POSIX_FADV_WILLNEED asks for to the disk's largest request, so it is asked piece by piece.
AHEAD_BYTES = 2 << 20
