"""One suite for a real part and for its fake; `public` is the one for the API, wherever messages live."""
