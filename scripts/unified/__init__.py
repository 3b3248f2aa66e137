"""The parts of scripts/unified_view.py."""
