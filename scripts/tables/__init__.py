"""A package, so that PyTables, which is imported by the same name, is not found in its place."""
