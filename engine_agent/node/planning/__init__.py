"""A node's decisions, from plain values: no clock, process, file, log or socket."""
