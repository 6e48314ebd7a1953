"""Reserved for what runs inside a cloud function; empty in this version."""
