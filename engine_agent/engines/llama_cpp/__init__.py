"""Engine `llama-cpp`: llama.cpp's server from one GGUF file, in the launcher's process."""
