"""The sites of a Pyro program: read from a trace, held as points, supplied with values."""
