"""What it promises, held against a world that breaks."""
