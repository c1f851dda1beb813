"""Files that anybody may have made, read safely; and files that are written whole or not at all."""
