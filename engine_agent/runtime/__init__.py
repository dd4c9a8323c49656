"""The node agent: connection, journal, supervision of processes. Ingress agents share connection and journal."""
