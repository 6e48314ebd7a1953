"""S3's protocol, without its network: requests in, responses out, nothing awaited."""
