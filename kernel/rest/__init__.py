"""What every view set of the REST API inherits: ETags, preconditions, idempotent POSTs, rate limits, ordering, watching
(docs/design/operators.md#rest-conventions). It knows no fleet, no traffic and no URL."""
