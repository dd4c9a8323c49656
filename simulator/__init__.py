"""The fleet on a virtual clock: the live planners and the live agents' decisions over a simulated world."""
