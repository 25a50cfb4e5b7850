"""Other projects' ways of calling, and our functions inside other projects."""
