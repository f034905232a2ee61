"""Test classes that are shipped, so that whoever adds a store can show that it keeps the contract."""
