"""The simulator engine: vLLM's HTTP API and metrics, with a time model instead of a neural network."""
