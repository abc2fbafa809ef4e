"""Models for other programs: transformers, vLLM, TensorRT-LLM, llama.cpp. scripts/export.py is the command."""
