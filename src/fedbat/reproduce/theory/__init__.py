"""The theorems on toy problems: pure toys and bounds, trials that measure them, records, and their section."""
