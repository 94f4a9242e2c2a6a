"""What methods must know of a network's layers: dropout masks, batch norm, moments of SGD's iterates."""
