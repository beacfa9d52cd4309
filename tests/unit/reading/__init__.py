"""Views of data directories that the real writers made."""
