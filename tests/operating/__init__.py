"""What the person on call has: the commands, the doctor, the telemetry."""
