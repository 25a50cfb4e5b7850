"""Mathematical equality of answers."""
