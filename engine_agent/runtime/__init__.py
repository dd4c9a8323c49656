"""The node agent: connection, journal, supervision of processes. Ingress agents share the connection and the journal."""
