"""What is asked to be generated, and what the answers are: planned whole, before the engine computes them. Pure."""
