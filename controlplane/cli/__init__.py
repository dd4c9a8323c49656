"""The command `switchyard`: a client of the REST API for operators. It uses only that API and its own profiles."""
