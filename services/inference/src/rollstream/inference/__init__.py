"""A vLLM replica and the agent that keeps its weights current."""
