"""Pictures of prompts: their price from their headers, their pixels as encoders take them. Knows no torch."""
