"""Every error this package raises on purpose.

FedbatError
├── ConfigError    a setting is out of range, unknown, or contradicts another one
├── DataError      a data set is missing, damaged, or cannot be split as asked
├── WireError      bytes that are not a valid message for this model
│   └── DivergedError    ... because the sender's training diverged
└── MethodError    a round was driven in a way a method cannot follow

A few modules derive their own errors from these, so that callers can tell them apart.
Every message says what we got, what we expected, and what to do about it.
"""


class FedbatError(Exception):
    """Base of all errors meant for the user."""


class ConfigError(FedbatError):
    """A setting is out of range, unknown, or contradicts another one."""


class DataError(FedbatError):
    """A data set is missing, damaged, or cannot be split as asked."""


class WireError(FedbatError):
    """Bytes that are not a valid message for this model."""


class DivergedError(WireError):
    """A message holds numbers that are not finite, or too large to be used: the sender's training diverged."""


class MethodError(FedbatError):
    """A round was driven in a way a method cannot follow: training bypassed it, or there is no upload to go on with."""
