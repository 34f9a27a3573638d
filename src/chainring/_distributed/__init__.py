"""Communication between ranks, and tensors that are sharded over them."""
