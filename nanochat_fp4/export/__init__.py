"""Writes and reads models in the formats of transformers, vLLM and llama.cpp. scripts/export.py is the command."""
