"""What every link between hosts is made of, on whichever side."""
