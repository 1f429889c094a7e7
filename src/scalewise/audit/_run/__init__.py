"""Both lanes over a program, equation by equation, and what is noted on the way."""
