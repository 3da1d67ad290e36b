"""What users declare, and what a role object answers by itself."""
