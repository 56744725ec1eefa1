"""`python -m fedbat` is the command line."""

from fedbat.cli import main

main()
