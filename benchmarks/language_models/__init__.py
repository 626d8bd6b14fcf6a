"""Hugging Face's GPT-2 and Llama in a pipeline, beside the unsplit model."""
