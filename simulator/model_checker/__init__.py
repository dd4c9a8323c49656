"""Visits every state that a small fleet can come to in the middle of a rollout, whatever is lost, repeated, late, or
crashes: `python -m simulator.model_checker`."""
