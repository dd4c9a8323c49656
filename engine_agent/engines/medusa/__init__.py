"""Medusa heads for a model: captured from its own answers, trained, evaluated, written as an artifact."""
