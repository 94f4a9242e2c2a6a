"""The log density of a Pyro program: its sites, traced once into a function of a flat vector."""
