"""Makes tests/helpers importable as ``helpers`` from every test folder."""
