"""What all HTTP services of this project share: access control, error format, start and stop."""
