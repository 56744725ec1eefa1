"""Which method, and how many bits each way: figures for docs/choosing.md, and the width docs/downlink.md recommends."""
