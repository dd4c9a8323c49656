"""One vLLM replica over several nodes: a leader with scheduler and API, and followers in lock-step."""
