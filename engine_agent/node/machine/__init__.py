"""The agent of a host: it joins the host to a fleet, runs one node or ingress agent there, and leaves again."""
