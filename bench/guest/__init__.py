"""Batch work beside real-time requests: rules compared on virtual time, and the real parts measured."""
