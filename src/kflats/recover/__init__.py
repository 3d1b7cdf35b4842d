"""A compressed model trained again: on its task, towards its original, or both."""
