"""The part that decides. Pure: same inputs, same decisions; it cannot act (the import rules fail the build)."""
