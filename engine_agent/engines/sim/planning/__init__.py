"""What is requested, and the whole answers, planned before the engine computes them. Pure."""
