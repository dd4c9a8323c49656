"""A client for tests that ask the same process again and again."""

import httpx

CLIENT = httpx.Client(limits=httpx.Limits(max_keepalive_connections=0), timeout=60)
"""Each new client reads all certificates that there are, which takes 26 ms: more than what is asked for. It keeps no
connection, for who answers may be killed and started again."""
