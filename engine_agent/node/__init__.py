"""The agents of a node and of a machine. Ingress agents share connection, identity and journal. See README.md."""
