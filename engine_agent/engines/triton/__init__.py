"""Engine `triton`: Triton Inference Server with its Python backend, behind OpenAI's API."""
