"""Shared by all packages: errors, digests, JSON, values by name, and printing."""
