"""The relay of an ingress: continues streams whose cell failed or leaves."""
