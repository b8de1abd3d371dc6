"""Where images come from (`datasets`, `images`) and how they reach a step."""
