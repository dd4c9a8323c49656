"""The agent of a host: it joins, runs the one node or ingress agent that it is told to, and leaves again."""
