"""What requests cost: prices, receipts, and the ledger they are written to."""
