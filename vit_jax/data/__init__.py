"""Where images come from (`datasets` and its sources) and how they reach a step."""
