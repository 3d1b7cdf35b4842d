"""What kflats is compared with: compressions and error references that need no training data, one paper per file."""
