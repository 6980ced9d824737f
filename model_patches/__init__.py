"""How Dustin reaches into Hugging Face models: one attention function, and one short file per architecture."""
