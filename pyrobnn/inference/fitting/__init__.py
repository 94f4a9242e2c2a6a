"""What every fit does: the problem it is given, mini-batches, memory, and what it notes."""
