"""Results of other tools, converted to spectune's words. A definition that a file does not state is asked for."""
