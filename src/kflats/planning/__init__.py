"""Planning: weights are selected, candidates get bytes and errors, and one budget is shared among the weights."""
