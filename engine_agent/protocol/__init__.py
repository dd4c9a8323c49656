"""The agent protocol: messages, states, ports and codec, shared by agents and the control plane."""
