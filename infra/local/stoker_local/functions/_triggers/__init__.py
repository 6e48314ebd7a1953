"""What calls functions by itself: buckets, queues and clocks."""
