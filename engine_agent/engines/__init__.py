"""Engines: how a node starts the process that computes tokens, one package for each engine, behind one interface."""
