"""The declared layers."""
