"""Hold specs to the installed transformers, and write their first drafts."""
