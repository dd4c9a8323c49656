"""The ingress agent: a routing table becomes HAProxy that serves it, and what HAProxy sees becomes reports."""
