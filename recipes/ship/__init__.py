"""Images: the Dockerfiles, the tool's part in building them, and publishing."""
