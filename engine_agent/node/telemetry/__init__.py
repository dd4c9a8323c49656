"""The hardware and software of a machine, their use and their faults. Read only."""
