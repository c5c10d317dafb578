"""What models write beside plain text, told by their chat templates: thoughts, and calls of tools."""
