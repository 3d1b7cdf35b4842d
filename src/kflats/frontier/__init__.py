"""Size against quality: one table stored in many ways at many sizes, beside its rivals."""
