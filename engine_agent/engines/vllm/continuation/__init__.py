"""Streams that began at another engine, continued by vLLM 0.32: the request is repeated with the tokens that its client
has (`engine_agent.protocol.continuation`).

The API server sees one generation. `replay` feeds the repeated tokens through vLLM's own `OutputProcessor`, so text,
stop strings, parsed reasoning and tool calls, finish reason and usage are those of an undisturbed run. The engine core
sees a request that was preempted after these tokens: `core` presets them as its output. Limits, penalties, bad words
and the automaton of structured output therefore continue, and nothing is generated twice. `middleware` connects both to
HTTP."""
