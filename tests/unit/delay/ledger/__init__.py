"""The ledger: what is noted of rows that have ended, and what the files say of them."""
