"""Where snapshots and the files beside them lie: a directory, or the objects under an address."""

import os

from chainring._files import is_url
from chainring._places.base import Directory, Place


def open_place(address: str | os.PathLike[str]) -> Place:
    """Return what is at a path or an address; nothing needs to be there."""
    if is_url(address):
        from chainring._places.remote import RemotePlace  # the door to object stores, which few programs need

        return RemotePlace(os.fspath(address))
    return Directory(address)
