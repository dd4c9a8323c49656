"""The command `switchyard`: an operator's hands on the REST API. It knows nothing but that API and its own profiles."""
