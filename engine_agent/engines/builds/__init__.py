"""Engine builds: packs an installed engine with its Python into a folder that runs anywhere, and unpacks it."""
