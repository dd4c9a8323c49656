"""One vLLM replica over several nodes: a leader with scheduler and API, followers in lock-step (design.md §7)."""
