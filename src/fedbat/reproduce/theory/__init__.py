"""The theorems on toy problems: pure toys and bounds, trials that measure them, their records, and their section."""
