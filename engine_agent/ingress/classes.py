"""Serving classes, under the name by which this folder knows them."""

from engine_agent.protocol.states import ServingClass

__all__ = ["ServingClass"]
