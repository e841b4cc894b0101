"""What the router forwards to: HTTP in front of the scheduler."""
