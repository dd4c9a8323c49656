"""The simulator engine: the same HTTP and metrics as vLLM, with a time model in place of a network of weights."""
