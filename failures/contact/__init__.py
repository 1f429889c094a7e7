"""Programs of first contact: of reports that were new when they were written, before any audit."""
