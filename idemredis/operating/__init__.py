"""For the person on call: what is in the ledger, is this Redis fit for it, and what is happening now."""
