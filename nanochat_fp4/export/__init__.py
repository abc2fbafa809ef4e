"""Models for other programs: transformers, vLLM, llama.cpp. scripts/export.py is the command."""
