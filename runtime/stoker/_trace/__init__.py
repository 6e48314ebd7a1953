"""What the training loop waited for: object and phase of every wait, on record in bounded memory."""
