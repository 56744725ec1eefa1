"""Which method, how many bits each way: the figures of docs/choosing.md and the width docs/downlink.md recommends."""
