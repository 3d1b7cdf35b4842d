"""What every package uses: errors, digests, JSON, values by name, and how things are printed."""
