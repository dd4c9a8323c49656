"""What a node should do next, decided from plain values: no clock, process, file, log or socket."""
