"""Any server that speaks OpenAI's API, as an engine: a program that the operator of a machine has put there."""
