"""Models for software without kflats, and adapters on top of compressed models."""
