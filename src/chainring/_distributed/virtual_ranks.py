"""Virtual ranks: an update is computed as that many, whatever the number of real ones."""

from __future__ import annotations


def block_of(rank: int, size: int, virtual_ranks: int) -> range:
    """Return the virtual ranks that rank ``rank`` of ``size`` computes: contiguous, and as even as can be."""
    return range(rank * virtual_ranks // size, (rank + 1) * virtual_ranks // size)
