"""Headers that applications, ingresses and cells speak in. Names only; a header means what its docstring says."""

from typing import Final

HOP: Final = "X-Switchyard-Hop"
"""On a request that another region's ingress sent here: it must be served here or not at all."""
CLASS: Final = "X-Switchyard-Class"
"""A request may ask to be less urgent than its pool, never more."""
CELL: Final = "X-Switchyard-Cell"
"""On an answer: which cell gave it."""
RETRY: Final = "X-Switchyard-Retry"
"""On a cell's 503: it did not send the request to its engine."""
REGION: Final = "X-Switchyard-Region"
"""On an answer: the region of that cell."""
MODEL: Final = "X-Switchyard-Model"
"""On a request that the reader sends back: the model, URL-encoded because it came out of a body."""
