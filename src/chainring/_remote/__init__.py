"""Object stores: objects under an address, and the lease by which one run writes there at a time."""
