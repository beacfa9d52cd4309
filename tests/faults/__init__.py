"""Every read fails once, and each file is what it should not be: what servers do about it."""
