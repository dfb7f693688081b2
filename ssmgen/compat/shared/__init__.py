"""Code that several peers' drop-ins share."""
