"""What a machine and its software are, and how busy they are. Read only."""
