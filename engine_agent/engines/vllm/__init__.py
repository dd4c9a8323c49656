"""The vLLM engine: its own Python environment, its weights, its launcher, and its adapter for the agent."""
