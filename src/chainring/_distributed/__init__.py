"""Communication among ranks, and tensors that are sharded over them."""
