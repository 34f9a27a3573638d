"""A run in an object store: its lease, its snapshots there, and the directory on this machine for the files beside them."""

from __future__ import annotations

import os

from chainring._remote.bucket import Bucket
from chainring._remote.lease import Lease
from chainring._remote.mirror import Mirror, working_directory
from chainring.serializers._object_store import ObjectStore


def find_place(url: str) -> tuple[str, str]:
    """Return the directory on this machine for the files of a run, and the address as it is written.

    Raises:
        ImportError: obstore is not installed.
        ValueError: it is not an address.
    """
    url = Bucket(os.fspath(url)).url
    return str(working_directory(url)), url


class RemoteRun:
    """What a run in an object store has while it continues; the process that writes there makes it.

    Raises:
        BlockingIOError: another run writes there.
        ValueError: the store does not know conditions.
        OSError: the store does not answer, or refuses.

    Attributes:
        store: the snapshots.
    """

    def __init__(self, url: str, folder: str | os.PathLike[str]) -> None:
        bucket = Bucket(url)
        bucket.check_conditions()
        self.store = ObjectStore(bucket)
        self._lease = self.store.lease = Lease(bucket, self.store.stamps)
        self._files: Mirror | None = None
        try:
            self._files = self.store.files = Mirror(bucket, folder, self._lease)
            self._files.fetch()
        except BaseException:
            self._lease.release()
            raise

    def close(self) -> None:
        """Put the last files into the store, and let other runs write there.

        Raises:
            OSError: they could not be put; the error says where they are.
        """
        try:
            if self._files is not None:
                self._files.close()
        finally:
            self._lease.release()
