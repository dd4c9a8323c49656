"""What pages show, read in a constant number of queries whatever the size of the fleet. Never changes anything."""
