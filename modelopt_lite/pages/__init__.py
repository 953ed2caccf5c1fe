"""Pages for people beside an export: its report, and its model card."""
