"""Proof on a GPU: the agent's path without a control plane."""
