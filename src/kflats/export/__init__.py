"""Models for stacks that know nothing of kflats, and adapters on top of those that do."""
