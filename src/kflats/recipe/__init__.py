"""What is asked and what is decided, as values: a recipe for one weight, a plan for all, a budget for both."""
