"""What a model wrote -> reasoning, content and tool calls, as it arrives."""
