"""Codecs carried out: rows become coded matrices that take at most so many bytes."""
