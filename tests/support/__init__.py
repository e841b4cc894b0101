"""What several tests need: tiny models, processes under test."""
