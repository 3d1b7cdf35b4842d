"""Ways to store an embedding table, kflats' own and others, each at the sizes that it has."""
