"""What was noted as findings, and the fixes that are tried."""
