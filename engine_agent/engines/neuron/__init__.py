"""vLLM on AWS Trainium and Inferentia: the vLLM Neuron plugin on NxDI. Nothing of Neuron is imported here."""
