"""The one way in which an ingress says that it cannot carry a routing table out. Decides nothing."""


class BadTable(ValueError):
    """A routing table that no ingress can carry out; the text says what is wrong with what."""
