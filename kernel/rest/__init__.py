"""What every view set of the REST API inherits: ETags, preconditions, idempotent POSTs, rate limits, ordering, watching
(docs/adr/0028-rest-conventions.md). It knows no fleet, no traffic and no URL."""
