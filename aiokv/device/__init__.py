"""What a server's devices do, and when: decided here, without a device, a clock or an array."""
