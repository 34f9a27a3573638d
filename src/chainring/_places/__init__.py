"""Where snapshots and the files beside them lie: a directory, or the objects under an address."""
