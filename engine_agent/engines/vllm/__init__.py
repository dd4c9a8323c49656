"""The vLLM engine: its Python environment, its weights, its launcher, and its adapter for the agent."""
