"""Who plays each part: hardware, loading, the policy and scalar parts, adapters, roles, export."""
