"""The launcher behind `make up`: embedded PostgreSQL and Valkey, the control plane's processes, and their supervision.

It starts, watches and stops processes. It imports no Django and decides nothing about the fleet: it must work while
the settings, the database or the fleet do not."""
