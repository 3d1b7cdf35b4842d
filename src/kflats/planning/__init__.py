"""Which weight is treated how, in how many bytes: selected, priced, and given its share of one budget."""
