"""Visits every state of a small fleet in the middle of a rollout with lost, repeated and late messages and crashes:
`python -m simulator.model_checker`."""
