"""What runs inside a stateless function: handlers for any platform, and thin adapters to Lambda and Google's."""
