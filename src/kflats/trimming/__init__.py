"""Vocabulary trimming: fewer entries, in the tokenizer and in the model."""
