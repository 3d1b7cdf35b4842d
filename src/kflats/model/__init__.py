"""The weights of a model: find them, replace them by factors, put them back, and describe them for loading."""
