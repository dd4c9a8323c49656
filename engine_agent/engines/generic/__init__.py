"""Engine `generic`: any server with OpenAI's API that the operator of a machine has installed."""
