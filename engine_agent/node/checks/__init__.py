"""Deep checks of a node: memory, computation of its devices, disk, and links to other nodes. Each is bounded in time
and load, reports what it found and what would be right, and leaves nothing behind. See README.md."""
