"""One suite for a real part and for its fake."""
